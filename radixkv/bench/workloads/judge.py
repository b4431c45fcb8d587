"""Articles that are judged by many rubrics."""

from __future__ import annotations

from radixkv.bench.session import Request, Session, Turns
from radixkv.bench.workloads.answers import right_mention
from radixkv.bench.workloads.documents import documents_of
from radixkv.bench.workloads.parameters import Answered
from radixkv.bench.workloads.problems.layout import asked
from radixkv.bench.workloads.problems.lookup import Document, about
from radixkv.bench.workloads.source import Made, Source


class Judge(Answered, frozen=True, kw_only=True, tag="judge"):
    """Articles, each judged by many rubrics at once: requests that share the article and end in a question each."""

    num_documents: int = 8
    num_questions: int = 8
    """Rubrics of each article."""
    num_facts: int = 100
    """Of each made article."""

    def make(self, source: Source) -> Made:
        """A session an article, whose rubrics are sent together. O(size).

        Raises:
            ConfigError: the data set, of documents with questions, cannot be read, or is too short.
        """
        documents, counts = documents_of(source, self.num_documents, self.num_questions, self.num_facts)
        return Made([self._judged(document) for document in documents], counts)

    def _judged(self, document: Document) -> Session:
        head = about(document)
        requests = [
            Request(head + asked(problem), self.output_len, is_right=right_mention(problem))
            for problem in document.problems
        ]

        def turns() -> Turns:
            yield requests

        return Session(turns, n_requests=len(requests))
