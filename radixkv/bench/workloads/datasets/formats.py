"""The formats of data sets."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Format(NamedTuple):
    """How a kind of file looks, and what it is for."""

    name: str
    shape: str
    """An item."""
    fields: frozenset[str]
    """That any of its items has, and items of other formats have not all of."""
    workload: str
    """The shipped one that reads it."""


TRACE = Format(
    name="a Mooncake trace",
    shape='{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": ids}',
    fields=frozenset({"timestamp", "input_length", "hash_ids"}),
    workload="trace",
)
PROBLEMS = Format(
    name="a file of problems",
    shape='{"question": text, "answer": text}',
    fields=frozenset({"question", "answer"}),
    workload="fewshot",
)
MESSAGES = Format(
    name="a file of OpenAI messages",
    shape='{"messages": OpenAI\'s} or {"conversations": [{"from": who, "value": text}, ...]}',
    fields=frozenset({"messages"}),
    workload="agents",
)
SHAREGPT = MESSAGES._replace(name="a file of ShareGPT's kind", fields=frozenset({"conversations"}))
DOCUMENTS = Format(
    name="a file of documents",
    shape='{"text": document, "questions": [{"question": text, "answer": text}, ...]}',
    fields=frozenset({"questions"}),
    workload="long-document-qa",
)
FORMATS = (TRACE, PROBLEMS, MESSAGES, SHAREGPT, DOCUMENTS)


def format_of(item: bytes) -> Format | None:
    """The format that a JSON object is an item of; None: an unknown one, or no object."""
    try:
        fields = msgspec.json.decode(item, type=dict[str, msgspec.Raw]).keys()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return next((each for each in FORMATS if each.fields <= fields), None)
