"""Questions of many users about a few long documents."""

from __future__ import annotations

from random import Random

from radixkv.bench.session import Request, lone
from radixkv.bench.workloads.answers import right_mention
from radixkv.bench.workloads.documents import documents_of
from radixkv.bench.workloads.parameters import Answered
from radixkv.bench.workloads.problems.layout import asked
from radixkv.bench.workloads.problems.lookup import about
from radixkv.bench.workloads.source import Made, Source


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
