"""Arguments that are written as text become values of the types of their schema."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from radixkv.generation.parsers.argument_types import argument_types, argument_value
from radixkv.generation.parsers.formats import TOOL_FIELD, XML_CALLS

DEFINITIONS = {
    "Count": {"type": "integer"},
    "Twice": {"$ref": "#/$defs/Count"},
    "Loop": {"$ref": "#/$defs/Loop"},
    "a/b": {"enum": [True, None]},
}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"$ref": "#/$defs/Count"}, "3", 3),
        ({"$ref": "#/$defs/Twice"}, "3", 3),
        ({"$ref": "#/$defs/a~1b"}, "True", True),
        ({"$ref": "#/$defs/a~1b"}, "None", None),
        ({"$ref": "#/$defs/Loop"}, "3", "3"),
        ({"$ref": "#/$defs/missing"}, "3", "3"),
        ({"$ref": "https://example.com/schema"}, "3", "3"),
        ({"allOf": [{"$ref": "#/$defs/Count"}]}, "3", 3),
        ({"anyOf": [{"$ref": "#/$defs/Count"}, {"type": "null"}]}, "null", None),
        ({"enum": [1, 2.5]}, "2.5", 2.5),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": 7}, "7", 7),
        ({"type": "string", "enum": ["1"]}, "1", "1"),
        ({"type": "array"}, "[1, ", "[1, "),
        ({"type": "array"}, "{}", "{}"),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"type": "integer"}, "null", None),
        ({"type": "number"}, "None", None),
        ({"type": "array"}, " NULL\n", None),
        ({"anyOf": [{"type": "null"}, {"type": "object"}]}, "none", None),
        ({"type": ["integer", "string"]}, "null", None),
        ({"type": ["string", "integer"]}, "null", "null"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "NULL", None),
        ({"type": "array"}, "['a', 'b']", ["a", "b"]),
        ({"type": "array"}, "\n('a', None, True)\n", ["a", None, True]),
        ({"type": "array"}, "\"['a']\"", ["a"]),
        ({"type": "object"}, "{'a': [1, {'b': 2.5}]}", {"a": [1, {"b": 2.5}]}),
        ({"type": "object"}, "{1: 2}", {"1": 2}),
        ({"type": ["object", "array"]}, "['a']", ["a"]),
        ({"type": "object"}, "['a']", "['a']"),
        ({"type": "array"}, "{'a'}", "{'a'}"),
        ({"type": "array"}, "[b'a']", "[b'a']"),
        ({"type": "array"}, "[1e999]", "[1e999]"),
        ({"type": "array"}, "[f()]", "[f()]"),
        ({"type": "array"}, "['a'", "['a'"),
        ({"type": "object"}, "{(1, 2): 3}", "{(1, 2): 3}"),
        ({"type": "array"}, "['a', " + "[" * 100_000, "['a', " + "[" * 100_000),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "integer"}, "2.5", "2.5"),
        ({"type": {"a": 1}, "anyOf": 3, "enum": 4}, "3", "3"),
        (True, "3", "3"),
        (None, "3", "3"),
    ],
)
def test_values_by_schema(schema: Any, text: str, expected: object) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": DEFINITIONS}
    found = argument_value(text, argument_types(parameters, "a"))
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize("parameters", [{}, {"properties": None}, {"properties": {"b": {"type": "integer"}}}])
def test_without_a_schema_a_value_is_its_text(parameters: dict[str, Any]) -> None:
    assert argument_value("3", argument_types(parameters, "a")) == "3"


TEMPLATE = {"start_anchor": "\x00", "fields": {TOOL_FIELD: XML_CALLS}}
TYPES = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])
TEXTS = st.sampled_from(
    ["3", "-2.0", "2.5", "1e3", "inf", "true", "False", "1", "null", "None", '["a"]', '{"a": 1}', "a"]
)


@given(
    schema=TYPES.map(lambda kind: {"type": kind})
    | st.lists(TYPES, min_size=1, max_size=3).map(lambda kinds: {"type": kinds})
    | st.lists(TYPES, min_size=1, max_size=3).map(lambda kinds: {"anyOf": [{"type": kind} for kind in kinds]}),
    text=TEXTS,
)
def test_values_are_those_of_transformers(schema: dict[str, Any], text: str) -> None:
    parameters = {"type": "object", "properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    answer = f"<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>"
    message = parse_response(answer, TEMPLATE, prefix="", tools=[tool])
    expected = message[TOOL_FIELD][0]["function"]["arguments"]["a"]
    types = argument_types(parameters, "a")
    if text in ("null", "None") and [one for one in types if one != "null"][:1] != ["string"]:
        expected = None  # as in vLLM, whose parser takes null whatever the schema says of it
    found = argument_value(text, types)
    assert (found, type(found)) == (expected, type(expected))
