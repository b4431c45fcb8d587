"""Prompts that share nothing."""

from __future__ import annotations

from radixkv.bench.session import Request, lone
from radixkv.bench.workloads.answers import right_result
from radixkv.bench.workloads.parameters import Answered
from radixkv.bench.workloads.problems.layout import asked, worked
from radixkv.bench.workloads.questions import groups, problems_of
from radixkv.bench.workloads.source import Made, Source


class Unshared(Answered, frozen=True, kw_only=True, tag="unshared"):
    """Prompts that share nothing: each has its number, worked examples of its own, and a question.

    What the prefix cache costs where it cannot help.
    """

    num_prompts: int = 64
    num_shots: int = 4

    def make(self, source: Source) -> Made:
        """As ``FewShot.make``."""
        count = self.num_prompts * (self.num_shots + 1)
        problems, counts = problems_of(source, count, settings="num_prompts or num_shots")
        sessions = []
        for number, (*shots, last) in enumerate(groups(problems, self.num_shots + 1), 1):
            prompt = f"{number}. {worked(shots)}{asked(last)}"
            sessions.append(lone(Request(prompt, self.output_len, is_right=right_result(last))))
        return Made(sessions, counts)
