"""Many sampled answers to each question, of which the most frequent counts."""

from __future__ import annotations

from random import Random

from radixkv.bench.session import Request, lone
from radixkv.bench.workloads.answers import mostly_right_result
from radixkv.bench.workloads.parameters import Answered
from radixkv.bench.workloads.problems.layout import asked, worked
from radixkv.bench.workloads.questions import problems_of
from radixkv.bench.workloads.sampled import TEMPERATURE, sampling_seed
from radixkv.bench.workloads.source import Made, Source


class SelfConsistency(Answered, frozen=True, kw_only=True, tag="self-consistency"):
    """Worked examples that all prompts share, then one question each, answered several times with sampling.

    A prompt is right if most of its answers are.
    """

    num_prompts: int = 48
    num_samples: int = 4
    """Choices of a request."""
    num_shots: int = 4

    def make(self, source: Source) -> Made:
        """As ``FewShot.make``."""
        count = self.num_shots + self.num_prompts
        problems, counts = problems_of(source, count, settings="num_prompts or num_shots")
        shots = worked(problems[: self.num_shots])
        rng = Random(source.seed)
        return Made(
            [
                lone(
                    Request(
                        shots + asked(problem),
                        self.output_len,
                        n=self.num_samples,
                        temperature=TEMPERATURE,
                        seed=sampling_seed(rng),
                        is_right=mostly_right_result(problem),
                    )
                )
                for problem in problems[self.num_shots :]
            ],
            counts,
        )
