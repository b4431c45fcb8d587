"""Problems of extraction: a text and a JSON schema, to be answered with the JSON that has the text's values."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from training.chat_format import Conversation, Message
from training.made_values import (
    bare_text,
    field_names,
    field_schema,
    listed,
    scalar_schema,
    spoken,
    thing_name,
    value_of,
)

HELD_OUT_SHARE = 10
"""One in this many combinations of fields is never seen in training."""
_SYSTEMS = ("You extract data from texts.", "Answer with JSON alone.", "You are a helpful assistant.", "")


class Record(NamedTuple):
    """Values of a schema's fields, with sentences that state them."""

    value: dict[str, Any]
    facts: list[str]


class Kind(NamedTuple):
    """A kind of things that have the same fields."""

    noun: str
    schema: Mapping[str, Any]
    """The JSON schema of a record."""

    def draw(self, rng: random.Random) -> Record:
        """Returns a record with random values."""
        values: dict[str, Any] = {}
        facts: list[str] = []
        for name, schema in self.schema["properties"].items():
            values[name], stated = _draw_value(rng, name, schema)
            facts += stated
        return Record(values, facts)


def generate_extractions(seed: int, n_records: int, *, is_held_out: bool = True) -> Iterator[Conversation]:
    """Yields endless chats of one question; equal arguments give equal chats.

    Args:
        seed: any integer.
        n_records: records in the text; from two on, the question names one of them.
        is_held_out: whether the schemas are those that training leaves out, or the others.
    """
    rng = random.Random(f"extraction {seed} {n_records} {is_held_out}")
    while True:
        kind = _draw_kind(rng)
        names = " ".join(sorted(kind.schema["properties"]))
        if (zlib.crc32(names.encode()) % HELD_OUT_SHARE == 0) is is_held_out:
            yield _conversation(rng, kind, n_records)


def _conversation(rng: random.Random, kind: Kind, n_records: int) -> Conversation:
    records = [kind.draw(rng) for _ in range(n_records)]
    chosen = rng.randrange(n_records)
    names: dict[str, None] = {}
    while len(names) < n_records:
        names[bare_text(rng)] = None
    paragraphs = [
        _paragraph(rng, record, name if n_records > 1 else "") for name, record in zip(names, records, strict=True)
    ]
    text = "\n\n".join(paragraphs)
    target = f"the {kind.noun}" if n_records == 1 else f"the {kind.noun} {[*names][chosen]}"
    schema = _schema_text(rng, kind.schema)
    system, user = rng.choice(_SYSTEMS), ""
    is_plain = all(field["type"] not in ("array", "object") for field in kind.schema["properties"].values())
    wording = rng.randrange(4 if is_plain else 3)  # without the schema, a list of one item looks like a text
    if wording == 0:
        user = f"Extract {target} as JSON by this schema:\n{schema}\n\n{text}"
    elif wording == 1:
        user = f"{text}\n\nGive {target} as JSON. Schema: {schema}"
    elif wording == 2:
        system = f"{system or 'Answer with JSON.'} It must match this schema:\n{schema}"
        user = f"{text}\n\nExtract {target}."
    else:
        keys = listed([*kind.schema["properties"]])
        user = f"Extract {target} as a JSON object with the keys {keys}.\n\n{text}"
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    messages += [
        {"role": "user", "content": user},
        {"role": "assistant", "content": json.dumps(records[chosen].value, ensure_ascii=False)},
    ]
    return Conversation(messages, schema=kind.schema)


def _paragraph(rng: random.Random, record: Record, name: str = "") -> str:
    """Returns a text with the facts of a record in random order."""
    facts = [*record.facts]
    rng.shuffle(facts)
    separator = rng.choice((" ", "\n"))
    return separator.join([f"About {name}:", *facts] if name else facts)


def _draw_kind(rng: random.Random) -> Kind:
    names = field_names(rng, rng.choice((2, 3, 3, 4, 5, 6)))
    properties = {name: _draw_schema(rng) for name in names}
    has_titles = rng.random() < 0.2
    if has_titles:
        properties = {name: {**schema, "title": spoken(name).title()} for name, schema in properties.items()}
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": names}
    if rng.random() < 0.4:
        schema["additionalProperties"] = False
    noun = thing_name(rng)
    return Kind(noun, {"title": noun.capitalize(), **schema} if has_titles else schema)


def _draw_schema(rng: random.Random) -> Mapping[str, Any]:
    """Returns the schema of a scalar, a list of scalars, or an object."""
    if rng.random() < 0.12:
        names = field_names(rng, rng.choice((2, 2, 3)))
        return {
            "type": "object",
            "properties": {name: scalar_schema(rng) for name in names},
            "required": names,
        }
    return field_schema(rng)


def _draw_value(rng: random.Random, name: str, schema: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Returns a value that the schema allows, and the sentences that state it."""
    if schema["type"] == "object":
        parts = {part: value_of(rng, inner) for part, inner in schema["properties"].items()}
        stated = listed([f"{spoken(part)} {value.text}" for part, value in parts.items()])
        return {part: value.value for part, value in parts.items()}, [f"The {spoken(name)} has {stated}."]
    value = value_of(rng, schema)
    field = spoken(name)
    if schema["type"] == "boolean" and rng.random() < 0.3:
        return value.value, [f"It {'has' if value.value else 'has no'} {field}."]
    if schema["type"] == "array":
        return value.value, [rng.choice((f"The {field} are {value.text}.", f"{field}: {value.text}."))]
    wordings = (f"The {field} is {value.text}.", f"{field}: {value.text}.", f"Its {field} is {value.text}.")
    return value.value, [rng.choice(wordings)]


def _schema_text(rng: random.Random, schema: Mapping[str, Any]) -> str:
    form = rng.random()
    if form < 0.7:
        return json.dumps(schema)
    return json.dumps(schema, separators=(",", ":")) if form < 0.9 else json.dumps(schema, indent=1)
