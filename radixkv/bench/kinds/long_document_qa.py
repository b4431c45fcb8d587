"""Questions of many users about a few long documents."""

from __future__ import annotations

from random import Random

from radixkv.bench.families.layout import asked
from radixkv.bench.families.lookup import about
from radixkv.bench.kinds.answers import right_mention
from radixkv.bench.kinds.documents import documents_of
from radixkv.bench.kinds.parameters import Answered
from radixkv.bench.kinds.source import Made, Source
from radixkv.bench.session import Request, lone


class LongDocumentQA(Answered, frozen=True, kw_only=True, tag="long-document-qa"):
    """Long documents with several questions each, all of different users, in an order that mixes the documents."""

    num_documents: int = 6
    num_questions: int = 6
    """About each document."""
    num_facts: int = 160
    """Of each made document."""

    def make(self, source: Source) -> Made:
        """A session a question, in an order that the seed shuffles; otherwise as ``Judge.make``."""
        documents, counts = documents_of(source, self.num_documents, self.num_questions, self.num_facts)
        sessions = [
            lone(Request(about(document) + asked(problem), self.output_len, is_right=right_mention(problem)))
            for document in documents
            for problem in document.problems
        ]
        Random(source.seed).shuffle(sessions)
        return Made(sessions, counts)
