"""Workload of several sampled answers to each question, decided by majority."""

from __future__ import annotations

from random import Random

from radixkv.lab.bench.session import BenchRequest, single_request_session
from radixkv.lab.bench.workloads.arithmetic import problems_from
from radixkv.lab.bench.workloads.base import (
    TEMPERATURE,
    FixedOutputParameters,
    Source,
    WorkloadSessions,
    sampling_seed,
)
from radixkv.lab.bench.workloads.problems import majority_result_check, question_prompt


class SelfConsistency(FixedOutputParameters, frozen=True, kw_only=True, tag="self-consistency"):
    """Prompts of worked examples that all share, followed by one question each, with several sampled answers.

    A request is correct if the most frequent result of its choices is.
    """

    num_prompts: int = 48
    num_samples: int = 4
    """Choices of each request."""
    num_shots: int = 4

    def make(self, source: Source) -> WorkloadSessions:
        """Returns one session for each question, as ``FewShot.make``."""
        shots, problems, counts = problems_from(source, self.num_shots, self.num_prompts)
        rng = Random(source.seed)
        return WorkloadSessions(
            [
                single_request_session(
                    BenchRequest(
                        shots + question_prompt(problem),
                        self.output_len,
                        n=self.num_samples,
                        temperature=TEMPERATURE,
                        seed=sampling_seed(rng),
                        check=majority_result_check(problem),
                    )
                )
                for problem in problems
            ],
            counts,
        )
