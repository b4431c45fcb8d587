"""Workload of prompts without shared prefixes."""

from __future__ import annotations

from radixkv.lab.bench.session import single_request_session
from radixkv.lab.bench.workloads.arithmetic import groups, problems_from
from radixkv.lab.bench.workloads.base import FixedOutputParameters, Source, WorkloadSessions
from radixkv.lab.bench.workloads.problems import question_request, result_check, worked_examples


class Unshared(FixedOutputParameters, frozen=True, kw_only=True, tag="unshared"):
    """Prompts that share no prefix: each has its number, its own worked examples, and a question.

    This measures the cost of the prefix cache where it has no hits.
    """

    num_prompts: int = 64
    num_shots: int = 4

    def make(self, source: Source) -> WorkloadSessions:
        """Returns one session for each question, as ``FewShot.make``."""
        _, problems, counts = problems_from(source, 0, self.num_prompts * (self.num_shots + 1))
        sessions = []
        for number, (*shots, last) in enumerate(groups(problems, self.num_shots + 1), 1):
            head = f"{number}. {worked_examples(shots)}"
            sessions.append(single_request_session(question_request(head, last, self.output_len, result_check)))
        return WorkloadSessions(sessions, counts)
