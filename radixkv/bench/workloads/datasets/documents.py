"""Reading of documents with questions."""

from __future__ import annotations

from pathlib import Path

import msgspec

from radixkv.bench.workloads.datasets.formats import DOCUMENTS
from radixkv.bench.workloads.datasets.lines import Items, read_lines
from radixkv.bench.workloads.problems.lookup import Document
from radixkv.bench.workloads.problems.problem import MARK, Problem


class _Line(msgspec.Struct, frozen=True):
    questions: list[Problem]
    text: str | None = None
    context: str | None = None
    document: str | None = None

    def read(self) -> Document:
        texts = [text for text in (self.text, self.context, self.document) if text is not None]
        if len(texts) != 1:
            raise ValueError("it must have one of text, context and document")
        if not self.questions:
            raise ValueError("it has no questions")
        return Document(text=texts[0], problems=tuple(map(_with_mark, self.questions)))


def read_documents(path: Path, *, skip_bad_lines: bool = False) -> Items[Document]:
    """Reads the documents of a file; the text may be named ``text``, ``context`` or ``document``.

    An answer without the mark of a result is itself the result.

    Raises:
        ConfigError: as ``read_lines``; a line is also bad if it has no text or no questions.
    """
    decoder = msgspec.json.Decoder(_Line)
    return read_lines(
        path, lambda line: decoder.decode(line).read(), expected=DOCUMENTS, skip_bad_lines=skip_bad_lines
    )


def _with_mark(problem: Problem) -> Problem:
    if MARK in problem.answer:
        return problem
    return Problem(problem.question, f"{MARK} {problem.answer}")
