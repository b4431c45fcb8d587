"""JSON schemas: made ones, those that applications send, and hostile ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

N_MADE = 140
"""Number of made schemas; with the written ones there are 200."""


def corpus() -> list[Any]:
    """Returns the schemas that must be enforced, always the same."""
    return [*written(), *(MadeSchema(seed).root() for seed in range(N_MADE))]


def closed(**properties: Any) -> Schema:
    """Returns the schema of an object that has exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


class MadeSchema:
    """Makes one random schema."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._definitions: dict[str, Schema] = {}

    def root(self) -> Schema:
        """Returns an object, with definitions that it refers to."""
        schema = self._object(0)
        return schema | ({"$defs": self._definitions} if self._definitions else {})

    def _any(self, depth: int) -> Schema:
        leaves: list[Callable[[], Schema]] = [
            *(self._string, self._string, self._integer, self._number),
            *(self._enum, lambda: {"type": "boolean"}, lambda: {"type": "null"}, self._const),
        ]
        inner: list[Callable[[], Schema]] = [
            lambda: self._object(depth + 1),
            lambda: self._array(depth + 1),
            lambda: self._union(depth + 1),
            lambda: self._reference(depth + 1),
        ]
        return self._random.choice(leaves if depth >= 3 else leaves + inner)()

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(_NAMES, self._random.randint(0, 4))
        schema: Schema = {"type": "object", "properties": {name: self._any(depth) for name in names}}
        required = [name for name in names if self._random.random() < 0.6]
        if required:
            schema["required"] = self._random.sample(required, len(required))
        match self._random.randrange(6):
            case 0:
                schema["additionalProperties"] = self._any(depth + 1)
            case 1:
                schema["additionalProperties"] = True
            case 2 if names:
                schema["minProperties"] = self._random.randint(0, 1)
                schema["maxProperties"] = self._random.randint(max(1, len(required)), 5)
            case 3 if not names:
                schema["patternProperties"] = {"^x-[a-z]+$": self._any(depth + 1)}
            case _:
                schema["additionalProperties"] = False
        return schema

    def _array(self, depth: int) -> Schema:
        schema: Schema = {"type": "array", "items": self._any(depth)}
        if self._random.random() < 0.3:
            schema["prefixItems"] = [self._any(depth) for _ in range(self._random.randint(1, 2))]
        if self._random.random() < 0.5:
            schema["minItems"] = self._random.randint(0, 3)
        if self._random.random() < 0.5:
            schema["maxItems"] = self._random.randint(3, 5)
        return schema

    def _union(self, depth: int) -> Schema:
        match self._random.randrange(3):
            case 0:
                return {"anyOf": [self._any(depth) for _ in range(self._random.randint(1, 3))]}
            case 1:
                kinds = ["cat", "dog", "fish"][: self._random.randint(1, 3)]
                return {"oneOf": [closed(kind={"const": kind}, size=self._any(depth)) for kind in kinds]}
        return {"type": self._random.sample(["string", "integer", "boolean", "null", "array"], 2)}

    def _reference(self, depth: int) -> Schema:
        name = self._random.choice(["node", "item/of~this", "größe"])
        if self._definitions.get(name) == {}:  # it is being made: without null, it might contain itself without end
            return {"anyOf": [_reference_to(name), {"type": "null"}]}
        if name not in self._definitions:
            self._definitions[name] = {}
            body = self._object(depth)
            body.setdefault("properties", {})["next"] = {"anyOf": [_reference_to(name), {"type": "null"}]}
            self._definitions[name] = body
        return _reference_to(name)

    def _string(self) -> Schema:
        match self._random.randrange(5):
            case 0:
                return {"type": "string", "maxLength": self._random.randint(0, 12)}
            case 1:
                shortest = self._random.randint(0, 4)
                return {"type": "string", "minLength": shortest, "maxLength": shortest + self._random.randint(0, 5)}
            case 2:
                return {"type": "string", "pattern": self._random.choice(_PATTERNS)}
            case 3:
                return {"type": "string", "format": self._random.choice(_FORMATS)}
        return {"type": "string", "description": "any text", "default": ""}

    def _integer(self) -> Schema:
        low = self._random.randint(-200, 100)
        match self._random.randrange(4):
            case 0:
                return {"type": "integer", "minimum": low, "maximum": low + self._random.randint(0, 5000)}
            case 1:
                return {"type": "integer", "exclusiveMinimum": low}
            case 2:
                return {"type": "integer", "multipleOf": self._random.choice([1, 5, 12])}
        return {"type": "integer"}

    def _number(self) -> Schema:
        low = round(self._random.uniform(-20, 20), self._random.randint(0, 2))
        match self._random.randrange(4):
            case 0:
                return {"type": "number", "minimum": low, "maximum": low + self._random.choice([0.5, 1, 17.25])}
            case 1:
                return {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + 3}
            case 2:
                return {"type": "number", "maximum": low}
        return {"type": "number"}

    def _enum(self) -> Schema:
        return {"enum": self._random.sample(_VALUES, self._random.randint(1, 4))}

    def _const(self) -> Schema:
        return {"const": self._random.choice(_VALUES)}


def _reference_to(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name.replace('~', '~0').replace('/', '~1')}"}


_NAMES = ["id", "name", "a b", 'say "hi"', "größe", "price", "tags", "back\\slash", "日本", "$ref", "type", "enum"]
_PATTERNS = [
    *(
        "^[a-z]+$",
        "^\\d{3}-\\d{4}$",
        "^(red|green|blue)$",
        "[A-Z]{2,4}",
        "^\\w+@\\w+\\.com$",
        "^[^,;]*$",
        "^.{2,6}$",
    ),
    *("^ä[ö-ü]+$", "^(ab|cd)*$", "^\\S+$", "^#[0-9a-fA-F]{6}$", "^v?\\d+(\\.\\d+){0,2}$"),
]
_FORMATS = ["date", "time", "date-time", "duration", "email", "uuid", "ipv4", "ipv6", "hostname", "uri", "int32"]
_VALUES: list[Any] = [
    *("red", "green", "", 'a "quoted" one', "line\nbreak", "größe", "🎉", 0, 1, -7, 2.5, 1e20, True, False, None),
    *([], {}, [1, "two", None], {"a": {"b": [True]}}),
]


def written() -> list[Any]:
    """Returns schemas of the shapes that applications and their libraries send."""
    tree = {"$ref": "#/$defs/tree"}
    cat, dog = closed(kind={"const": "cat"}, lives={"type": "integer"}), closed(kind={"const": "dog"}, name=_TEXT)
    return [
        {},
        True,
        {"type": "object"},
        {"type": "array"},
        {"type": "string"},
        {"type": "object", "properties": {}},
        {"type": "object", "additionalProperties": False},
        closed(name=_TEXT, age={"type": "integer", "minimum": 0, "maximum": 150}),
        closed(answer={"enum": ["yes", "no"]}, confidence={"type": "number", "minimum": 0, "maximum": 1}),
        closed(email={"type": "string", "format": "email"}, born={"type": "string", "format": "date"}),
        closed(id={"type": "string", "format": "uuid"}, at={"type": "string", "format": "date-time"}),
        closed(host={"type": "string", "format": "ipv4"}, port={"type": "integer", "minimum": 1, "maximum": 65535}),
        closed(steps={"type": "array", "items": closed(explanation=_TEXT, output=_TEXT)}, final_answer=_TEXT),
        {"$defs": {"tree": closed(value=_TEXT, children={"type": "array", "items": tree})}, "$ref": "#/$defs/tree"},
        closed(value={"type": "integer"}, next={"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
        {
            "$defs": {
                "a": closed(b={"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}),
                "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}},
            },
            "$ref": "#/$defs/a",
        },
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#"}}]},
        {
            "$defs": {"cat": cat, "dog": dog},
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/cat", "dog": "#/$defs/dog"}},
        },
        closed(pet={"oneOf": [cat, dog, {"type": "null"}]}),
        {"oneOf": [{"type": "string"}, {"type": "integer"}, {"enum": [None, True]}]},
        {"allOf": [closed(x={"type": "number"})]},
        {"type": ["object", "null"], "properties": {"x": {"type": ["string", "number"]}}, "required": ["x"]},
        {"type": "object", "patternProperties": {"^S_": _TEXT}},
        {"type": "object", "patternProperties": {"^S_": _TEXT}, "properties": {"n": {"type": "integer"}}},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 3},
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
        {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,3}$"}, "maxProperties": 2},
        {"type": "object", "properties": {"a": _TEXT, "b": _TEXT, "c": _TEXT}, "minProperties": 2},
        {
            "type": "object",
            "properties": {"a": _TEXT, "b": _TEXT, "c": _TEXT},
            "minProperties": 1,
            "maxProperties": 2,
        },
        {"type": "object", "properties": {"a": _TEXT}, "required": ["a", "b"], "additionalProperties": True},
        {"type": "object", "properties": {"a": _TEXT}, "unevaluatedProperties": False},
        {
            "properties": {"a": {"minimum": 3}, "b": {"minLength": 2}, "c": {"minItems": 1}},
            "required": ["a", "b", "c"],
        },
        {"type": "array", "prefixItems": [_TEXT, {"type": "integer"}], "items": False},
        {"type": "array", "prefixItems": [_TEXT], "items": {"type": "boolean"}, "minItems": 3, "maxItems": 4},
        {"type": "array", "minItems": 2, "maxItems": 2},
        {"type": "array", "items": True, "maxItems": 0},
        {"type": "array", "items": {"type": "array", "items": {"enum": [0, 1]}, "minItems": 2, "maxItems": 2}},
        {"const": {"a": [1, 2.5, "x", None, True, {}]}},
        {"enum": ["a", 1, 2.0, None, "b"], "type": ["string", "integer"]},
        {"type": "integer", "minimum": -3, "exclusiveMaximum": 3},
        {"type": "integer", "minimum": 10, "maximum": 100, "multipleOf": 15},
        {"type": "number", "minimum": -0.25, "maximum": 1e6},
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.001},
        {"type": "string", "minLength": 3},
        {"type": "string", "maxLength": 0},
        {"type": "string", "maxLength": 300},
        {"type": "string", "pattern": "^(\\([0-9]{3}\\))?[0-9]{3}-[0-9]{4}$"},
        {"type": "string", "format": "password"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": _TEXT}, "$ref": "#/$defs/a"},
        {"definitions": {"n": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/definitions/n"}},
        closed(nested=closed(nested=closed(nested=closed(nested=closed(x={"type": "null"}))))),
        closed(
            **{
                f"field_{i}": [_TEXT, {"type": "integer"}, {"type": "boolean"}, {"enum": ["a", "b"]}][i % 4]
                for i in range(50)
            }
        ),
        closed(query=_TEXT, limit={"type": "integer", "default": 10, "title": "Limit", "examples": [5]}),
        closed(when={"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}], "default": None}),
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "https://a.example/b",
            **closed(x=_TEXT),
        },
        closed(unit={"type": "string", "enum": ["celsius", "fahrenheit"]}, city={"type": "string", "minLength": 1}),
        closed(rows={"type": "array", "items": {"type": "object", "additionalProperties": _TEXT}, "maxItems": 3}),
        {"type": "array", "items": {"anyOf": [cat, dog]}, "minItems": 1, "maxItems": 3},
    ]


_TEXT: Schema = {"type": "string"}
