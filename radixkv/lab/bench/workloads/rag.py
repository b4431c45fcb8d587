"""Workload of questions about documents that a search has found, in changing order."""

from __future__ import annotations

from random import Random
from typing import ClassVar

from radixkv.errors import ConfigError
from radixkv.lab.bench.session import single_request_session
from radixkv.lab.bench.workloads.base import FixedOutputParameters, Source, WorkloadSessions
from radixkv.lab.bench.workloads.documents import (
    Document,
    Documents,
    document_head,
    documents_from,
    generate_corpus,
)
from radixkv.lab.bench.workloads.problems import mention_check, question_request

INSTRUCTION = "Answer the question from these notes, which a search has found. They are in no particular order.\n\n"


class Rag(FixedOutputParameters, frozen=True, kw_only=True, tag="rag"):
    """Independent questions, each behind one instruction and the documents that a search found for it.

    A prompt has the document with the answer and others. Documents at the beginning of the corpus are found more
    often: document number r with weight 1/r. Their order is random. A prefix cache finds the instruction and
    the documents that come first in the same order; the same documents in another order are behind other tokens.
    """

    repeats_chunks: ClassVar[bool] = True

    num_documents: int = 16
    """Documents of the corpus."""
    num_questions: int = 3
    """Questions about each document; each is a request."""
    num_chunks: int = 6
    """Documents in each prompt, at most ``num_documents``."""
    num_facts: int = 20
    """Facts in each generated document."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_chunks > self.num_documents:
            raise ConfigError(
                f"num_chunks {self.num_chunks} must be at most num_documents {self.num_documents}: a prompt has "
                "each document once"
            )

    def make(self, source: Source) -> WorkloadSessions:
        """Returns one session for each question, shuffled by the seed; otherwise as ``Judge.make``."""
        documents, counts = self._documents(source)
        rng = Random(source.seed)
        sessions = [
            single_request_session(
                question_request(self._head(documents, answering, rng), problem, self.output_len, mention_check)
            )
            for answering, document in enumerate(documents)
            for problem in document.problems
        ]
        rng.shuffle(sessions)
        return WorkloadSessions(sessions, counts)

    def _documents(self, source: Source) -> Documents:
        if source.dataset is not None:
            return documents_from(source, self.num_documents, self.num_questions, self.num_facts)
        corpus = generate_corpus(source.seed, self.num_documents, self.num_facts, self.num_questions)
        return Documents(corpus, {})

    def _head(self, documents: list[Document], answering: int, rng: Random) -> str:
        # Sorting by u ** (1 / weight), with u uniform, draws without replacement by weight.
        others = [index for index in range(len(documents)) if index != answering]
        others.sort(key=lambda index: -(rng.random() ** (index + 1)))
        chosen = [answering, *others[: self.num_chunks - 1]]
        rng.shuffle(chosen)
        return INSTRUCTION + "".join(document_head(documents[index]) for index in chosen)
