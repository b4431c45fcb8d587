"""Workload of prompts without shared prefixes."""

from __future__ import annotations

from radixkv.lab.bench.session import BenchRequest, single_request_session
from radixkv.lab.bench.workloads.arithmetic import groups, problems_from
from radixkv.lab.bench.workloads.base import FixedOutputParameters, Source, WorkloadSessions
from radixkv.lab.bench.workloads.problems import question_prompt, result_check, worked_examples


class Unshared(FixedOutputParameters, frozen=True, kw_only=True, tag="unshared"):
    """Prompts that share no prefix: each has its number, its own worked examples, and a question.

    This measures the cost of the prefix cache where it has no hits.
    """

    num_prompts: int = 64
    num_shots: int = 4

    def make(self, source: Source) -> WorkloadSessions:
        """Returns one session for each question, as ``FewShot.make``."""
        count = self.num_prompts * (self.num_shots + 1)
        problems, counts = problems_from(source, count, settings="num_prompts or num_shots")
        sessions = []
        for number, (*shots, last) in enumerate(groups(problems, self.num_shots + 1), 1):
            prompt = f"{number}. {worked_examples(shots)}{question_prompt(last)}"
            sessions.append(single_request_session(BenchRequest(prompt, self.output_len, check=result_check(last))))
        return WorkloadSessions(sessions, counts)
