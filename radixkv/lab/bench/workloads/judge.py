"""Workload of articles that are judged by several rubrics at once."""

from __future__ import annotations

from radixkv.lab.bench.session import Session, Turns
from radixkv.lab.bench.workloads.base import FixedOutputParameters, Source, WorkloadSessions
from radixkv.lab.bench.workloads.documents import Document, document_head, documents_from
from radixkv.lab.bench.workloads.problems import mention_check, question_request


class Judge(FixedOutputParameters, frozen=True, kw_only=True, tag="judge"):
    """Articles with several rubrics each, sent as concurrent requests that share the article."""

    num_documents: int = 8
    num_questions: int = 8
    """Rubrics of each article."""
    num_facts: int = 100
    """Facts in each generated article."""

    def make(self, source: Source) -> WorkloadSessions:
        """Returns one session for each article, whose rubrics are sent together. O(size).

        Raises:
            ConfigError: the data set of documents with questions cannot be read or is too short.
        """
        documents, counts = documents_from(source, self.num_documents, self.num_questions, self.num_facts)
        return WorkloadSessions([self._session(document) for document in documents], counts)

    def _session(self, document: Document) -> Session:
        head = document_head(document)
        requests = [
            question_request(head, problem, self.output_len, mention_check) for problem in document.problems
        ]

        def turns() -> Turns:
            yield requests

        return Session(turns, n_requests=len(requests))
