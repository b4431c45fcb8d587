"""Documents with questions, generated or read from a data set."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from radixkv.errors import ConfigError
from radixkv.lab.bench.workloads.base import Source, bad_lines, check_enough
from radixkv.lab.bench.workloads.datasets import DOCUMENTS, Items, read_lines
from radixkv.lab.bench.workloads.problems import MARK, Problem
from radixkv.lab.bench.workloads.templates import WORDS, Gaps, draw_values, read_templates

MAX_FACTS = 2000
"""Maximum number of facts in a document; the vocabulary has about 6,000 different subjects of facts."""
_PARAGRAPH = 6
"""Facts in a paragraph."""


class Document(msgspec.Struct, frozen=True):
    """A text and questions about it."""

    text: str
    problems: tuple[Problem, ...]


def generate_documents(seed: int, n_facts: int, n_problems: int) -> Iterator[Document]:
    """Yields endless documents, each with different questions; equal arguments give equal documents.

    Args:
        seed: seed of the texts.
        n_facts: facts in each document, of about 13 tokens each.
        n_problems: questions about each document, at most one for each fact.

    Raises:
        ConfigError: too many facts, or more questions than facts.
    """
    if not 1 <= n_facts <= MAX_FACTS:
        raise ConfigError(f"a document has 1 to {MAX_FACTS} facts, not {n_facts}")
    _check_questions(n_problems, n_facts)
    return _documents(random.Random(f"{seed} {n_facts} {n_problems}"), n_facts, n_problems)


def generate_corpus(seed: int, n_documents: int, n_facts: int, n_problems: int) -> list[Document]:
    """Returns documents of which no two answer the same question; otherwise as ``generate_documents``.

    Raises:
        ConfigError: too many facts in all, or more questions than facts in a document.
    """
    if not 1 <= n_documents * n_facts <= MAX_FACTS:
        raise ConfigError(
            f"a corpus has at most {MAX_FACTS} facts, not {n_documents * n_facts}: {n_facts} in each of "
            f"{n_documents} documents"
        )
    _check_questions(n_problems, n_facts)
    rng = random.Random(f"{seed} {n_documents} {n_facts} {n_problems}")
    facts = _facts(rng, n_documents * n_facts)
    return [_document(rng, facts[start : start + n_facts], n_problems) for start in range(0, len(facts), n_facts)]


def document_head(document: Document) -> str:
    """Returns the beginning of a prompt about the document, which ends in a blank line."""
    return document.text + "\n\n"


def _documents(rng: random.Random, n_facts: int, n_problems: int) -> Iterator[Document]:
    while True:
        yield _document(rng, _facts(rng, n_facts), n_problems)


def _document(rng: random.Random, facts: list[Problem], n_problems: int) -> Document:
    sentences = [fact.answer.partition("\n")[0] for fact in facts]
    paragraphs = [" ".join(sentences[start : start + _PARAGRAPH]) for start in range(0, len(facts), _PARAGRAPH)]
    title = (
        f"Notes on {rng.choice(WORDS['towns'])}, number {rng.randint(100, 999)}, by {rng.choice(WORDS['names'])}:"
    )
    return Document("\n".join([title, *paragraphs]), tuple(rng.sample(facts, n_problems)))


def _check_questions(n_problems: int, n_facts: int) -> None:
    if n_problems > n_facts:
        raise ConfigError(f"{n_problems} questions need as many facts; there are {n_facts}")


def _facts(rng: random.Random, n_facts: int) -> list[Problem]:
    """Returns different questions, each answered by a fact that is followed by the result."""
    facts: dict[str, Problem] = {}
    while len(facts) < n_facts:
        template = rng.choices(_TEMPLATES, _WEIGHTS)[0]
        values = draw_values(rng, template.gaps)
        question = template.question.format_map(values)
        answer = f"{template.sentence}\n{MARK} {template.result}".format_map(values)
        facts.setdefault(question, Problem(question, answer))
    return list(facts.values())


class _Template(msgspec.Struct, frozen=True):
    """A template of facts."""

    sentence: str
    question: str
    result: str
    gaps: Gaps
    weight: int = 1
    """How often it is drawn: more often if it has more facts, so that long documents do not run out of them."""


_TEMPLATES = read_templates("facts", _Template)
_WEIGHTS = [template.weight for template in _TEMPLATES]


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


class Documents(NamedTuple):
    """The documents of a workload."""

    items: list[Document]
    counts: dict[str, int]
    """As ``WorkloadSessions.counts``; ``missing_questions``: questions that documents of a data set lack."""


def documents_from(
    source: Source, count: int, n_questions: int, n_facts: int, *, settings: str = "num_documents"
) -> Documents:
    """Generates documents from the seed, or takes the first of the data set.

    Args:
        source: seed or data set.
        count: number of documents.
        n_questions: questions about each document; a document of a data set may have fewer.
        n_facts: facts in each generated document.
        settings: the workload's parameter that is ``count``, for the error's text.

    Raises:
        ConfigError: the data set cannot be read or is too short.
    """
    if source.dataset is None:
        return Documents(list(islice(generate_documents(source.seed, n_facts, n_questions), count)), {})
    read = read_documents(source.dataset, skip_bad_lines=source.skip_bad_lines)
    check_enough(source, "documents", len(read.items), count, settings=settings)
    documents = [Document(document.text, document.problems[:n_questions]) for document in read.items[:count]]
    counts = bad_lines(read.n_bad_lines)
    if n_missing := sum(n_questions - len(document.problems) for document in documents):
        counts["missing_questions"] = n_missing
    return Documents(documents, counts)
