"""Formats of data sets."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Format(NamedTuple):
    """A format of data sets."""

    name: str
    """The format's name in error texts, with article."""
    item_format: str
    """How an item looks, for error texts."""
    fields: frozenset[str]
    """Fields that every item has, and that no item of another format has all of."""
    workload: str
    """A shipped workload that reads this format."""


TRACE = Format(
    name="a Mooncake trace",
    item_format='{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": ids}',
    fields=frozenset({"timestamp", "input_length", "hash_ids"}),
    workload="trace",
)
PROBLEMS = Format(
    name="a file of problems",
    item_format='{"question": text, "answer": text}',
    fields=frozenset({"question", "answer"}),
    workload="fewshot",
)
MESSAGES = Format(
    name="a file of OpenAI messages",
    item_format='{"messages": OpenAI\'s} or {"conversations": [{"from": who, "value": text}, ...]}',
    fields=frozenset({"messages"}),
    workload="agents",
)
SHAREGPT = MESSAGES._replace(name="a file of ShareGPT's kind", fields=frozenset({"conversations"}))
DOCUMENTS = Format(
    name="a file of documents",
    item_format='{"text": document, "questions": [{"question": text, "answer": text}, ...]}',
    fields=frozenset({"questions"}),
    workload="long-document-qa",
)
FORMATS = (TRACE, PROBLEMS, MESSAGES, SHAREGPT, DOCUMENTS)


def format_of(item: bytes) -> Format | None:
    """Returns the format of a JSON object; None: the format is unknown, or ``item`` is no object."""
    try:
        fields = msgspec.json.decode(item, type=dict[str, msgspec.Raw]).keys()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return next((each for each in FORMATS if each.fields <= fields), None)
