"""Documents with questions, generated or read from a data set."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from radixkv.bench.workloads.datasets.documents import read_documents
from radixkv.bench.workloads.problems.lookup import Document, generate_documents
from radixkv.bench.workloads.questions import bad_lines, check_enough
from radixkv.bench.workloads.source import Source


class Documents(NamedTuple):
    """The documents of a workload."""

    items: list[Document]
    counts: dict[str, int]
    """As ``WorkloadSessions.counts``; ``missing_questions``: questions that documents of a data set lack."""


def documents_from(source: Source, count: int, n_questions: int, n_facts: int) -> Documents:
    """Generates documents from the seed, or takes the first of the data set.

    Args:
        source: seed or data set.
        count: number of documents.
        n_questions: questions about each document; those of a data set may have fewer.
        n_facts: facts in each generated document.

    Raises:
        ConfigError: the data set cannot be read or is too short.
    """
    if source.dataset is None:
        return Documents(list(islice(generate_documents(source.seed, n_facts, n_questions), count)), {})
    read = read_documents(source.dataset, skip_bad_lines=source.skip_bad_lines)
    check_enough(source, "documents", len(read.items), count, settings="num_documents")
    documents = [Document(document.text, document.problems[:n_questions]) for document in read.items[:count]]
    counts = bad_lines(read.n_bad_lines)
    if n_missing := sum(n_questions - len(document.problems) for document in documents):
        counts["missing_questions"] = n_missing
    return Documents(documents, counts)
