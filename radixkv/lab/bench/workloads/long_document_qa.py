"""Workload of questions about a few long documents."""

from __future__ import annotations

from random import Random

from radixkv.lab.bench.session import single_request_session
from radixkv.lab.bench.workloads.base import FixedOutputParameters, Source, WorkloadSessions
from radixkv.lab.bench.workloads.documents import document_head, documents_from
from radixkv.lab.bench.workloads.problems import mention_check, question_request


class LongDocumentQA(FixedOutputParameters, frozen=True, kw_only=True, tag="long-document-qa"):
    """Independent questions about long documents, in an order that mixes the documents."""

    num_documents: int = 6
    num_questions: int = 6
    """Questions about each document."""
    num_facts: int = 160
    """Facts in each generated document."""

    def make(self, source: Source) -> WorkloadSessions:
        """Returns one session for each question, shuffled by the seed; otherwise as ``Judge.make``."""
        documents, counts = documents_from(source, self.num_documents, self.num_questions, self.num_facts)
        sessions = [
            single_request_session(
                question_request(document_head(document), problem, self.output_len, mention_check)
            )
            for document in documents
            for problem in document.problems
        ]
        Random(source.seed).shuffle(sessions)
        return WorkloadSessions(sessions, counts)
