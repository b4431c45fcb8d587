"""Workload of questions after shared worked examples."""

from __future__ import annotations

from radixkv.lab.bench.session import single_request_session
from radixkv.lab.bench.workloads.arithmetic import problems_from
from radixkv.lab.bench.workloads.base import FixedOutputParameters, Source, WorkloadSessions
from radixkv.lab.bench.workloads.problems import question_request, result_check


class FewShot(FixedOutputParameters, frozen=True, kw_only=True, tag="fewshot"):
    """Prompts of worked examples that all share, followed by one question each."""

    num_prompts: int = 48
    num_shots: int = 8

    def make(self, source: Source) -> WorkloadSessions:
        """Returns one session for each question. O(size).

        Raises:
            ConfigError: the data set in GSM8K's format cannot be read or is too short.
        """
        shots, problems, counts = problems_from(source, self.num_shots, self.num_prompts)
        return WorkloadSessions(
            [
                single_request_session(question_request(shots, problem, self.output_len, result_check))
                for problem in problems
            ],
            counts,
        )
