"""Documents with questions for prompts: where they come from."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from radixkv.bench.workloads.datasets.documents import read_documents
from radixkv.bench.workloads.problems.lookup import Document, made_documents
from radixkv.bench.workloads.questions import bad_lines, check_enough
from radixkv.bench.workloads.source import Source


class Documents(NamedTuple):
    """As many as were asked for."""

    items: list[Document]
    counts: dict[str, int]
    """As ``Made.counts``; ``missing_questions`` are those that documents of a file have too few of."""


def documents_of(source: Source, count: int, n_questions: int, n_facts: int) -> Documents:
    """Documents with ``n_questions`` each: made from the seed with ``n_facts`` each, or the first of a file.

    Raises:
        ConfigError: the data set cannot be read, or is too short.
    """
    if source.dataset is None:
        return Documents(list(islice(made_documents(source.seed, n_facts, n_questions), count)), {})
    read = read_documents(source.dataset, skip_bad_lines=source.skip_bad_lines)
    check_enough(source, "documents", len(read.items), count, settings="num_documents")
    cut = [Document(document.text, document.problems[:n_questions]) for document in read.items[:count]]
    counts = bad_lines(read.n_bad_lines)
    if n_missing := sum(n_questions - len(document.problems) for document in cut):
        counts["missing_questions"] = n_missing
    return Documents(cut, counts)
