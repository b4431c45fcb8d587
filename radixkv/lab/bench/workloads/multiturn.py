"""Workload of chats as growing texts."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.lab.bench.session import BenchRequest, Session, Turns
from radixkv.lab.bench.workloads.arithmetic import groups, problems_from
from radixkv.lab.bench.workloads.base import ChatParameters, Source, WorkloadSessions
from radixkv.lab.bench.workloads.problems import TEACHER_PROMPT, Problem, question_prompt, result_check


class MultiTurn(ChatParameters, frozen=True, kw_only=True, tag="multiturn"):
    """Chats that begin with a shared system prompt with worked examples, followed by several questions each.

    A question is sent after the answer to the previous one, and its prompt is the whole chat so far. The recorded
    answers are the problems' own.
    """

    num_sessions: int = 16
    num_turns: int = 4
    num_shots: int = 3

    def make(self, source: Source) -> WorkloadSessions:
        """Returns one session for each chat; otherwise as ``FewShot.make``."""
        shots, problems, counts = problems_from(
            source, self.num_shots, self.num_sessions * self.num_turns, "num_sessions, num_turns or num_shots"
        )
        chats = groups(problems, self.num_turns)
        return WorkloadSessions([self._chat(TEACHER_PROMPT + shots, chat) for chat in chats], counts)

    def _chat(self, system: str, problems: Sequence[Problem]) -> Session:
        def turns() -> Turns:
            text = system
            for problem in problems:
                text += question_prompt(problem)
                (reply,) = yield (BenchRequest(text, self.output_len, check=result_check(problem)),)
                text += (reply.texts[0] if self.history == "model" else f" {problem.answer}") + "\n\n"

        return Session(turns, n_requests=len(problems))
