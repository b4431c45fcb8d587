"""Worked examples that all prompts share."""

from __future__ import annotations

from radixkv.bench.session import Request, lone
from radixkv.bench.workloads.answers import right_result
from radixkv.bench.workloads.parameters import Answered
from radixkv.bench.workloads.problems.layout import asked, worked
from radixkv.bench.workloads.questions import problems_of
from radixkv.bench.workloads.source import Made, Source


class FewShot(Answered, frozen=True, kw_only=True, tag="fewshot"):
    """Worked examples that all prompts share, then one new question each."""

    num_prompts: int = 48
    num_shots: int = 8

    def make(self, source: Source) -> Made:
        """A session a question. O(size).

        Raises:
            ConfigError: the data set, in GSM8K's format, cannot be read, or is too short.
        """
        count = self.num_shots + self.num_prompts
        problems, counts = problems_of(source, count, settings="num_prompts or num_shots")
        shots = worked(problems[: self.num_shots])
        return Made(
            [
                lone(Request(shots + asked(problem), self.output_len, is_right=right_result(problem)))
                for problem in problems[self.num_shots :]
            ],
            counts,
        )
