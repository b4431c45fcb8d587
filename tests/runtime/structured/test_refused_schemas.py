"""JSON schemas that no grammar enforces completely are refused, with the place and the keyword."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from radixkv.errors import InvalidRequest
from radixkv.runtime.structured.json_schema import prepare_schema
from radixkv.runtime.structured.source import prepare_source
from radixkv.wire.structured_outputs import StructuredOutputs
from support.json_schemas import closed

TEXT = {"type": "string"}
NUMBER = {"type": "number"}


def deep(n: int) -> dict[str, Any]:
    """Returns a schema that nests ``n`` arrays."""
    schema: dict[str, Any] = {}
    for _ in range(n):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED: list[tuple[Any, str]] = [
    ({"not": TEXT}, "not"),
    ({"type": "object", "if": {}, "then": {}}, "if"),
    (closed(a={"type": "array", "items": TEXT, "uniqueItems": True}), "uniqueItems"),
    ({"type": "array", "contains": TEXT}, "contains"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "dependentSchemas": {"a": {}}}, "dependentSchemas"),
    ({"$dynamicRef": "#a"}, "$dynamicRef"),
    ({"type": "array", "items": [TEXT]}, "prefixItems"),
    ({"allOf": [{"type": "object"}, {"required": ["a"]}]}, "allOf"),
    ({"type": "object", "anyOf": [{"required": ["a"]}]}, "type"),
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": NUMBER}}, "minimum"),
    ({"enum": ["a", "abc"], "minLength": 2}, "minLength"),
    ({"oneOf": [TEXT, {"enum": ["a", 1]}]}, "oneOf"),
    ({"oneOf": [closed(a=TEXT), closed(a=TEXT)]}, "oneOf"),
    ({"oneOf": [NUMBER, {"type": "integer"}]}, "oneOf"),
    ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "oneOf"),
    ({"minLength": 1, "minimum": 1}, "type"),
    ({"type": "string", "format": "email", "maxLength": 10}, "format"),
    ({"type": "string", "pattern": "a", "minLength": 10}, "pattern"),
    ({"type": "string", "format": "idn-email"}, "idn-email"),
    ({"type": "object", "patternProperties": {"^a": TEXT, "b$": NUMBER}}, "patternProperties"),
    ({"type": "object", "patternProperties": {"^a": TEXT}, "additionalProperties": NUMBER}, "patternProperties"),
    ({"type": "object", "patternProperties": {"^a": TEXT}, "properties": {"abc": NUMBER}}, "abc"),
    ({"type": "object", "propertyNames": {"maxLength": 3}, "additionalProperties": NUMBER}, "propertyNames"),
    ({"type": "object", "additionalProperties": NUMBER, "minProperties": 2}, "minProperties"),
    ({"type": "object", "properties": {"a": TEXT}, "required": ["b"]}, "'b'"),
    # Contradictions.
    ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
    ({"type": "object", "minProperties": 3, "maxProperties": 2}, "minProperties"),
    ({"enum": []}, "enum"),
    ({"enum": [1, 2], "type": "string"}, "enum"),
    (False, "false"),
    (closed(a=False), "$.properties.a"),
    # What refers to itself without end.
    ({"$ref": "#"}, "end"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "end"),
    (closed(child={"$ref": "#"}), "end"),
    (
        {
            "type": "object",
            "properties": {"child": {"$ref": "#/$defs/a"}},
            "$defs": {"a": closed(b={"$ref": "#/$defs/a"})},
        },
        "end",
    ),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "end"),
    # What is no schema.
    ({"$ref": "#/$defs/a"}, "#/$defs/a"),
    ({"$ref": "https://a.example/schema"}, "$ref"),
    ({"$ref": "#anchor"}, "$ref"),
    ({"$ref": 3}, "$ref"),
    (closed(a={"$id": "https://a.example/b"}), "$id"),
    ([], "object"),
    ("object", "object"),
    ({"type": "text"}, "text"),
    ({"type": []}, "type"),
    ({"type": "object", "properties": []}, "properties"),
    ({"type": "object", "properties": {"a": 3}}, "$.properties.a"),
    ({"type": "object", "required": "a"}, "required"),
    ({"anyOf": []}, "anyOf"),
    ({"anyOf": {}}, "anyOf"),
    ({"type": "string", "minLength": -1}, "minLength"),
    ({"type": "string", "maxLength": 1 << 33}, "maxLength"),
    ({"type": "string", "maxLength": "3"}, "maxLength"),
    ({"type": "string", "pattern": 3}, "pattern"),
    ({"type": "integer", "minimum": "3"}, "minimum"),
    ({"type": "integer", "exclusiveMinimum": True}, "exclusiveMinimum"),
    ({"const": 1 << 70}, "64 bits"),
    (deep(200), "deeper"),
]


@pytest.mark.parametrize(("schema", "named"), REFUSED)
def test_a_schema_is_refused_by_name(schema: Any, named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepare_schema(json.dumps(schema))
    assert caught.value.param == "structured_outputs"
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "{", "{'a': 1}", '{"type": "string"} x', "NaN", '{"const": 1e999}', '{"const": "\\ud800"}', "[" * 100_000],
)
def test_text_that_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepare_schema(text)
    assert caught.value.param == "structured_outputs"


def part(name: str, schema: Any) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": f"<f={name}>", "content": content, "end": "</f>"}


@pytest.mark.parametrize(
    "tag",
    [
        {"format": {"type": "or", "elements": [part("good", TEXT), part("bad", {"not": TEXT})]}},
        {"structures": [{"begin": f"<f={name}>", "schema": {name: {}}, "end": ""} for name in ("good", "not")]},
    ],
)
def test_the_part_of_a_structural_tag_is_named(tag: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepare_source(StructuredOutputs(structural_tag=json.dumps({"type": "structural_tag", **tag})))
    assert caught.value.param == "structured_outputs"
    assert "<f=bad>" in str(caught.value) or "<f=not>" in str(caught.value)
    assert "<f=good>" not in str(caught.value)


def test_what_restricts_nothing_is_accepted() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://a.example/b",
        "title": "Order",
        "x-vendor": {"not": "a keyword here"},
        **closed(
            ids={"type": "array", "items": {"type": "integer", "format": "int64"}, "uniqueItems": False},
            note={"type": "string", "format": "markdown", "contentMediaType": "text/markdown", "nullable": True},
        ),
    }
    prepared = json.loads(prepare_schema(json.dumps(schema)))
    validator = Draft202012Validator(prepared)

    assert validator.is_valid({"ids": [1, 2], "note": "x"})
    assert not validator.is_valid({"ids": [1, 2], "note": None})


@pytest.mark.parametrize("reference", ["#/$defs/a~1b", "#/$defs/a%2Fb", "#/%24defs/a~1b", "#/items/anyOf/0"])
def test_references_are_json_pointers(reference: str) -> None:
    schema = {
        "$defs": {"a/b": {"type": "boolean"}},
        "type": "array",
        "prefixItems": [{"$ref": reference}],
        "items": {"anyOf": [{"type": "boolean"}]},
    }
    validator = Draft202012Validator(json.loads(prepare_schema(json.dumps(schema))))

    assert validator.is_valid([True, False])
    assert not validator.is_valid([1])
