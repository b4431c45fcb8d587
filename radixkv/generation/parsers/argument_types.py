"""Values of arguments that a model writes as plain text, by the types of their JSON schema."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

_MAX_DEPTH = 16
"""References and unions within each other that are followed."""
_NAMES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
_UNFIT = object()


def argument_types(parameters: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Returns the types that a schema names for an argument, in its order; none if it names none.

    Args:
        parameters: schema of all arguments.
        key: of the argument.
    """
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return tuple(dict.fromkeys(_types(schema, parameters, _MAX_DEPTH)))


def argument_value(text: str, types: tuple[str, ...]) -> Any:
    """Returns the value that a text stands for: of the first type that it fits, else the text itself.

    As in vLLM's parser, lists and objects may be written as Python writes them, and ``null`` is null also for a
    schema that does not allow it, unless its first type is a text.
    """
    is_null = text.strip().lower() in ("null", "none")
    if is_null and types and next((one for one in types if one != "null"), "null") != "string":
        return None
    for kind in types:
        if kind != "string" and (value := _value(text, kind)) is not _UNFIT:
            return value
    return text


def _types(schema: object, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or not depth:
        return
    declared = schema.get("type")
    yield from (one for one in (declared if isinstance(declared, list) else [declared]) if isinstance(one, str))
    if declared is None:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else []
        values = [schema["const"]] if "const" in schema else values
        yield from (_NAMES[type(value)] for value in values if type(value) in _NAMES)
    for union in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            yield from _types(choice, root, depth - 1)
    if schema.get("nullable") is True:
        yield "null"
    yield from _types(_referenced(schema.get("$ref"), root), root, depth - 1)


def _referenced(reference: object, root: Mapping[str, Any]) -> object:
    """Returns what a reference to a part of the same schema points to; None if it points to nothing."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: object = root
    for name in reference.removeprefix("#/").split("/"):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _value(text: str, kind: str) -> object:
    """Returns the value of a type that a text stands for, ``_UNFIT`` if it stands for none."""
    word = text.strip()
    try:
        match kind:
            case "boolean" if word.lower() in ("true", "1", "false", "0"):
                return word.lower() in ("true", "1")
            case "null" if word.lower() in ("null", "none"):
                return None
            case "integer" | "number":
                return _number(word, kind)
            case "array" | "object":
                found = _container(word)
                return found if type(found) is (list if kind == "array" else dict) else _UNFIT
    except (ValueError, RecursionError, SyntaxError, TypeError, MemoryError):  # some of them of ``literal_eval``
        pass
    return _UNFIT


def _container(text: str) -> object:
    """Returns the value of JSON, or of a literal of Python that JSON has, also as a text in JSON."""
    try:
        found = json.loads(text)
    except ValueError:
        found = ast.literal_eval(text)
    if isinstance(found, str):
        found = ast.literal_eval(found)
    return json.loads(json.dumps(found, allow_nan=False))


def _number(word: str, kind: str) -> object:
    try:
        return int(word)
    except ValueError:
        number = float(word)
    if not math.isfinite(number):  # which JSON has not
        return _UNFIT
    if number.is_integer() and (kind == "integer" or "." not in word):
        return int(number)
    return number if kind == "number" else _UNFIT
