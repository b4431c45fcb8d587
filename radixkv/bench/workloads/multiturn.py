"""Chats: question after question, each behind the answer to the one before."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.bench.session import Request, Session, Turns
from radixkv.bench.workloads.answers import right_result
from radixkv.bench.workloads.parameters import Answered
from radixkv.bench.workloads.problems.layout import TEACHER, asked, worked
from radixkv.bench.workloads.problems.problem import Problem
from radixkv.bench.workloads.questions import groups, problems_of
from radixkv.bench.workloads.source import Made, Source


class MultiTurn(Answered, frozen=True, kw_only=True, tag="multiturn"):
    """Chats: a system prompt with worked examples that all share, then question after question.

    A question waits for the answer to the one before, and its prompt has all of the chat so far.
    """

    num_sessions: int = 16
    num_turns: int = 4
    num_shots: int = 3

    def make(self, source: Source) -> Made:
        """A session a chat; otherwise as ``FewShot.make``."""
        count = self.num_shots + self.num_sessions * self.num_turns
        problems, counts = problems_of(source, count, settings="num_sessions, num_turns or num_shots")
        system = TEACHER + worked(problems[: self.num_shots])
        chats = groups(problems[self.num_shots :], self.num_turns)
        return Made([self._chat(system, chat) for chat in chats], counts)

    def _chat(self, system: str, problems: Sequence[Problem]) -> Session:
        def turns() -> Turns:
            text = system
            for problem in problems:
                text += asked(problem)
                (reply,) = yield (Request(text, self.output_len, is_right=right_result(problem)),)
                text += reply.texts[0] + "\n\n"

        return Session(turns, n_requests=len(problems))
