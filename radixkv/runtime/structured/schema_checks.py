"""Questions about prepared JSON schemas: can a value end, can two schemas accept the same value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

Schema = Mapping[str, Any]

ANY = frozenset({"string", "number", "boolean", "null", "array", "object"})
"""All types of JSON values; an integer is a number."""


def check_endings(root: Schema, definitions: Mapping[str, Schema]) -> str | None:
    """Returns a definition that accepts no finite value; None if there is none.

    A definition ends if its required parts end. The set of those that do grows until nothing is added.
    """
    ending: set[str] = set()
    waiting = dict(definitions)
    while found := [name for name, schema in waiting.items() if _ends(schema, ending)]:
        ending.update(found)
        for name in found:
            del waiting[name]
    assert waiting or _ends(root, ending), "a schema without references ends"
    return next(iter(waiting), None)


def _ends(schema: Schema, ending: set[str]) -> bool:
    if "$ref" in schema:
        return _name(schema) in ending
    if "anyOf" in schema:
        return any(_ends(one, ending) for one in schema["anyOf"])
    return all(_ends(one, ending) for one in _required_parts(schema))


def _required_parts(schema: Schema) -> Iterator[Schema]:
    """Yields the schemas of which every accepted value contains a value."""
    for name in schema.get("required", ()):
        yield schema["properties"][name]
    yield from schema.get("prefixItems", ())
    if schema.get("minItems", 0) > len(schema.get("prefixItems", ())) and schema["items"] is not False:
        yield schema["items"]
    if schema.get("minProperties", 0) > 0 and not schema.get("required"):
        parts = [*schema.get("properties", {}).values(), *schema.get("patternProperties", {}).values()]
        if schema["additionalProperties"] is not False:
            parts.append(schema["additionalProperties"])
        if parts:
            yield {"anyOf": parts}


def check_one_of(options: Sequence[Schema], definitions: Mapping[str, Schema]) -> tuple[int, int] | None:
    """Returns the first two options that are not known to exclude each other; None if all do. O(options²)."""
    flat = [list(_alternatives(one, definitions, frozenset())) for one in options]
    for (i, first), (j, second) in combinations(enumerate(flat), 2):
        if not all(_exclude_each_other(one, other, definitions) for one in first for other in second):
            return i, j
    return None


def _alternatives(schema: Schema, definitions: Mapping[str, Schema], seen: frozenset[str]) -> Iterator[Schema]:
    """Yields the schemas without ``$ref`` and ``anyOf`` of which this one accepts the values."""
    if "$ref" in schema:
        name = _name(schema)
        if name not in seen:  # else it adds no values
            yield from _alternatives(definitions[name], definitions, seen | {name})
    elif "anyOf" in schema:
        for one in schema["anyOf"]:
            yield from _alternatives(one, definitions, seen)
    else:
        yield schema


def _exclude_each_other(first: Schema, second: Schema, definitions: Mapping[str, Schema]) -> bool:
    if _types(first).isdisjoint(_types(second)) or _have_other_values(first, second):
        return True
    names = set(first.get("required", ())).intersection(second.get("required", ()))
    return any(
        _have_other_values(one, other)
        for name in names
        for one in [_only_alternative(first["properties"][name], definitions)]
        for other in [_only_alternative(second["properties"][name], definitions)]
    )


def _have_other_values(first: Schema, second: Schema) -> bool:
    """Returns whether both are enums and have no value in common."""
    return "enum" in first and "enum" in second and _texts(first["enum"]).isdisjoint(_texts(second["enum"]))


def _only_alternative(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """Returns the schema without ``$ref`` and ``anyOf``; one that accepts anything if there are several."""
    alternatives = list(_alternatives(schema, definitions, frozenset()))
    return alternatives[0] if len(alternatives) == 1 else {}


def _texts(values: Sequence[Any]) -> set[str]:
    """Returns each value as a text that only equal values have."""
    return {json.dumps(_whole(value), sort_keys=True) for value in values}


def _whole(value: Any) -> Any:
    """Returns the value with whole numbers as integers: JSON Schema takes 1.0 and 1 for the same."""
    match value:
        case dict():
            return {name: _whole(one) for name, one in value.items()}
        case list():
            return [_whole(one) for one in value]
        case float() if value.is_integer():
            return int(value)
    return value


def _types(schema: Schema) -> frozenset[str]:
    if "enum" in schema:
        return frozenset(type_of(value) for value in schema["enum"])
    if "type" not in schema:
        return ANY
    return frozenset({"number" if schema["type"] == "integer" else schema["type"]})


def type_of(value: Any) -> str:
    """Returns the type of a JSON value; an integer is a number."""
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
    return "number"


def _name(schema: Schema) -> str:
    """Returns the name of the definition that a prepared schema refers to."""
    return str(schema["$ref"]).rpartition("/")[2]
