"""Workload of chats that return after their pages were evicted."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.lab.bench.session import BenchRequest, single_request_session
from radixkv.lab.bench.workloads.base import FixedOutputParameters, Source, WorkloadSessions
from radixkv.lab.bench.workloads.documents import Document, document_head, documents_from
from radixkv.lab.bench.workloads.problems import mention_check, question_request, worked_examples


class Pressure(FixedOutputParameters, frozen=True, kw_only=True, tag="pressure"):
    """Chats about a document each. All chats take their first turn, then all take their second, and so on.

    A chat returns after all other chats had a turn. If their pages fill the pool, its own were evicted. Prompts
    have recorded answers, so that every server gets the same requests.
    """

    num_sessions: int = 40
    """Chats."""
    num_turns: int = 4
    """Turns of each chat; a chat of a data set may have fewer."""
    num_questions: int = 1
    """Questions of each turn: all but the last have their recorded answers."""
    num_facts: int = 26
    """Facts in each generated document."""
    output_len: int = 24

    def make(self, source: Source) -> WorkloadSessions:
        """Returns one session for each turn of each chat, in the order of the turns. O(size).

        Raises:
            ConfigError: the data set of documents with questions cannot be read or is too short, or a generated
                document has fewer facts than questions.
        """
        n_questions = self.num_turns * self.num_questions
        documents, counts = documents_from(
            source, self.num_sessions, n_questions, self.num_facts, settings="num_sessions"
        )
        chats = [self._requests(document) for document in documents]
        return WorkloadSessions(
            [
                single_request_session(chat[turn], turn=turn)
                for turn in range(self.num_turns)
                for chat in chats
                if turn < len(chat)
            ],
            counts,
        )

    def _requests(self, document: Document) -> Sequence[BenchRequest]:
        """Returns the request of each turn: the document, all earlier questions with their answers, a question."""
        problems, head = document.problems, document_head(document)
        ends = [*range(self.num_questions, len(problems), self.num_questions), len(problems)]
        return [
            question_request(
                head + worked_examples(problems[: end - 1]), problems[end - 1], self.output_len, mention_check
            )
            for end in ends
        ]
