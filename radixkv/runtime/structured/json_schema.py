"""Turns a JSON schema into one that the grammar compiler enforces completely, or refuses it.

xgrammar ignores keywords that it does not know and keywords beside others, so that an answer might not validate.
What comes out of here has no such keyword. It accepts only values that the given schema accepts, though not all of
them: names that an object does not declare are allowed only where the schema asks for them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from radixkv.errors import InvalidRequest, shortened
from radixkv.runtime.structured.schema_checks import check_endings, check_one_of, type_of

Schema = dict[str, Any]

MAX_DEPTH = 100
"""Deepest nesting of schemas in schemas."""
MAX_SIZE = (1 << 31) - 1
"""Largest length or number of items, which xgrammar keeps in 32 bits."""
MAX_REPEATS = 128
"""Longest strings whose length is enforced by a pattern, which xgrammar makes one automaton of; it cannot for more
repeats. A length alone becomes a loop of rules, in which xgrammar cannot prepare masks: filling one then takes up
to 40 ms for 128,000 tokens, and 5 us in an automaton. Both allow the same strings."""

UNSUPPORTED = (
    "not if then else dependentRequired dependentSchemas dependencies contains minContains maxContains "
    "uniqueItems additionalItems $dynamicRef $recursiveRef"
).split()
"""Keywords that no grammar enforces."""

KEYWORDS = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"),
    "object": (
        *("properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties"),
        *("propertyNames", "minProperties", "maxProperties"),
    ),
}
"""By type: keywords that restrict values of this type only. ``integer`` has those of ``number``."""

TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
_COMBINING = ("$ref", "anyOf", "oneOf", "allOf")
_RESTRICTING = frozenset(("type", "const", "enum", *_COMBINING)).union(*KEYWORDS.values())

FORMATS = frozenset(
    "email date time date-time duration ipv4 ipv6 hostname uuid uri uri-reference uri-template json-pointer "
    "relative-json-pointer".split()
)
"""Formats that xgrammar has grammars for. They describe the form: 2026-02-31 is a ``date``."""
_OTHER_FORMATS = frozenset("idn-email idn-hostname iri iri-reference regex".split())
"""Formats of JSON Schema without a grammar in xgrammar. Any other name is an annotation, as the standard says."""


def prepare_schema(text: str) -> str:
    """Returns an equivalent or narrower schema, as JSON text, all of whose keywords are enforced. O(length).

    Raises:
        InvalidRequest: the text is not a JSON schema, accepts nothing, can never end, or has what no grammar
            enforces.
    """
    return json.dumps(prepare(_parse(text)))


def prepare(schema: Any) -> Schema:
    """Does what ``prepare_schema`` does, with parsed schemas."""
    try:
        return _Preparation(schema).run()
    except RecursionError:
        raise refusal("$", f"is nested deeper than {MAX_DEPTH} levels") from None


def refusal(path: str, problem: str) -> InvalidRequest:
    """Returns the error for a part of a JSON schema."""
    where = path if len(path) <= 80 else f"{path[:50]}...{path[-25:]}"
    return InvalidRequest(f"the JSON schema at {where} {problem}", param="structured_outputs")


def _parse(text: str) -> Any:
    def refuse_constant(name: str) -> None:
        raise refusal("$", f"has {name}, which is not JSON")

    try:
        schema = json.loads(text, parse_constant=refuse_constant)
        json.dumps(schema, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise refusal("$", f"is not valid JSON: {type(error).__name__}: {shortened(str(error))}") from None
    return schema


class _Preparation:
    """Prepares one schema. References become definitions of the new schema, each prepared once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}
        """Name of the definition for each JSON pointer that is referred to."""
        self._pending: list[str] = []
        """Pointers whose definitions are not prepared yet."""
        self._definitions: dict[str, Schema] = {}
        self._one_ofs: list[tuple[str, list[Schema]]] = []
        """Path and prepared options of each ``oneOf``."""

    def run(self) -> Schema:
        schema = self._schema(self._root, "$", 0)
        while self._pending:
            pointer = self._pending.pop()
            target = self._resolve(pointer)
            self._definitions[self._names[pointer]] = self._schema(target, pointer, 0)
        problem = check_endings(schema, self._definitions)
        if problem is not None:
            pointer = next((one for one, name in self._names.items() if name == problem), "$")
            raise refusal(pointer, "refers to itself without end; give it a way to end, such as null")
        for path, options in self._one_ofs:
            if (pair := check_one_of(options, self._definitions)) is not None:
                raise refusal(
                    path,
                    f"has options {pair[0]} and {pair[1]} in oneOf that may accept the same value; use anyOf, or "
                    "give each a required property with a const of its own",
                )
        return schema | ({"$defs": self._definitions} if self._definitions else {})

    def _schema(self, schema: Any, path: str, depth: int, *, default_type: str | None = None) -> Schema:
        if depth > MAX_DEPTH:
            raise refusal(path, f"is nested deeper than {MAX_DEPTH} levels")
        if schema is True:
            schema = {}
        if schema is False:
            raise refusal(path, "is false, which accepts no value")
        if not isinstance(schema, dict):
            raise refusal(path, f"is {shortened(schema)}; it must be an object or a Boolean")
        for keyword in UNSUPPORTED:
            if keyword in schema and not (keyword == "uniqueItems" and schema[keyword] is False):
                raise refusal(path, f"has {keyword}, which no grammar enforces; leave it out")
        if "$id" in schema and path != "$":
            raise refusal(path, "has $id below the root; use references that begin with #/")
        for keyword in ("$ref", "const", "enum", "anyOf", "oneOf", "allOf"):
            if keyword in schema:
                return self._combined(schema, keyword, path, depth)
        return self._typed(schema, path, depth, default_type)

    def _combined(self, schema: Schema, keyword: str, path: str, depth: int) -> Schema:
        others = _RESTRICTING.intersection(schema) - {keyword}
        if keyword in ("const", "enum"):
            others -= {"type"}
        if others:
            raise refusal(
                path, f"has {min(others)} beside {keyword}, where it is not enforced; put it into one schema"
            )
        value = schema[keyword]
        if keyword in ("const", "enum"):
            return self._enum([value] if keyword == "const" else value, schema, path)
        if keyword == "$ref":
            return self._reference(value, path)
        if not isinstance(value, list) or not value:
            raise refusal(path, f"has {keyword} {shortened(value)}; it must be a list of schemas")
        if keyword == "allOf" and len(value) > 1:
            raise refusal(path, "has allOf with several schemas, which no grammar enforces; merge them into one")
        options = [self._schema(one, f"{path}.{keyword}[{i}]", depth + 1) for i, one in enumerate(value)]
        if keyword == "oneOf":
            self._one_ofs.append((path, options))
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _enum(self, values: Any, schema: Schema, path: str) -> Schema:
        if not isinstance(values, list) or not values:
            raise refusal(path, f"has enum {shortened(values)}; it must be a list of values")
        if "type" in schema:
            types = _types(schema["type"], path)
            values = [value for value in values if any(_is_of_type(value, one) for one in types)]
            if not values:
                raise refusal(path, "has a const or enum without a value of its type")
        for value in values:
            _check_value(value, path)
        return {"enum": values}

    def _reference(self, pointer: Any, path: str) -> Schema:
        if not isinstance(pointer, str) or not re.fullmatch("#(/.*)?", pointer, re.DOTALL):
            raise refusal(path, f"has $ref {shortened(pointer)}; it must be # or begin with #/")
        if pointer not in self._names:
            self._resolve(pointer, path)
            self._names[pointer] = f"d{len(self._names)}"
            self._pending.append(pointer)
        return {"$ref": f"#/$defs/{self._names[pointer]}"}

    def _resolve(self, pointer: str, path: str = "$") -> Any:
        target = self._root
        for part in pointer.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                raise refusal(path, f"has $ref {shortened(pointer)}, and the schema has no such part")
        return target

    def _typed(self, schema: Schema, path: str, depth: int, default_type: str | None) -> Schema:
        if "type" in schema:
            types = _types(schema["type"], path)
        elif default_type is not None:
            types = [default_type]
        else:
            types = [one for one, keywords in KEYWORDS.items() if not schema.keys().isdisjoint(keywords)]
            if not types:
                return {}
            if len(types) > 1:
                raise refusal(path, f"has keywords of {' and of '.join(types)}; say its type")
        options = [self._of_type(one, schema, path, depth) for one in types]
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _of_type(self, kind: str, schema: Schema, path: str, depth: int) -> Schema:
        match kind:
            case "string":
                return self._string(schema, path)
            case "number" | "integer":
                return {"type": kind} | _numbers(schema, path)
            case "array":
                return self._array(schema, path, depth)
            case "object":
                return self._object(schema, path, depth)
        return {"type": kind}

    def _string(self, schema: Schema, path: str) -> Schema:
        shortest = _size(schema, "minLength", path) or 0
        longest = _size(schema, "maxLength", path)
        _check_order(shortest, longest, "minLength", path)
        kind, pattern = schema.get("format"), schema.get("pattern")
        if not isinstance(kind, str | None) or not isinstance(pattern, str | None):
            raise refusal(path, "has a format or pattern that is not a string")
        if kind in _OTHER_FORMATS:
            raise refusal(path, f"has format {kind}, which no grammar enforces; use pattern")
        has_format = kind in FORMATS
        has_length = shortest > 0 or longest is not None
        if has_format + (pattern is not None) + has_length > 1:
            raise refusal(path, "has two of format, pattern and a length, of which one is enforced; use pattern")
        if has_format:
            return {"type": "string", "format": kind}
        if pattern is not None:
            return {"type": "string", "pattern": pattern}
        if max(shortest, longest or 0) > MAX_REPEATS:
            return {"type": "string"} | _given(minLength=shortest or None, maxLength=longest)
        if has_length:
            return {"type": "string", "pattern": f"^.{{{shortest},{'' if longest is None else longest}}}$"}
        return {"type": "string"}

    def _array(self, schema: Schema, path: str, depth: int) -> Schema:
        fewest, most = _size(schema, "minItems", path) or 0, _size(schema, "maxItems", path)
        _check_order(fewest, most, "minItems", path)
        prefix = schema.get("prefixItems", [])
        items = schema.get("items", schema.get("unevaluatedItems", not prefix))
        if not isinstance(prefix, list):
            raise refusal(path, f"has prefixItems {shortened(prefix)}; it must be a list of schemas")
        if isinstance(items, list):
            raise refusal(path, "has a list as items; use prefixItems")
        prepared: Schema = {"type": "array", "items": False}
        if prefix:
            prepared["prefixItems"] = [
                self._schema(one, f"{path}.prefixItems[{i}]", depth + 1) for i, one in enumerate(prefix)
            ]
        if items is not False and most != 0:
            prepared["items"] = self._schema(items, f"{path}.items", depth + 1)
        return prepared | _given(minItems=fewest or None, maxItems=most)

    def _object(self, schema: Schema, path: str, depth: int) -> Schema:
        fewest, most = _size(schema, "minProperties", path) or 0, _size(schema, "maxProperties", path)
        _check_order(fewest, most, "minProperties", path)
        properties = _mapping(schema, "properties", path)
        patterns = _mapping(schema, "patternProperties", path)
        names = schema.get("propertyNames", True)
        is_open = not {"properties", "patternProperties"} & schema.keys()
        others = schema.get("additionalProperties", schema.get("unevaluatedProperties", is_open))
        required = self._required(schema, properties, others, path)
        has_names = names is not True and names != {}
        if has_names and (properties or patterns or others not in (True, {})):
            raise refusal(path, "has propertyNames beside schemas of properties, where it is not enforced")
        if fewest > 1 and (others is not False or patterns):
            # A grammar cannot know that a name has occurred, so that two equal names would count as two.
            raise refusal(path, f"has minProperties {fewest} with names of any kind; at most 1 is enforced there")
        _check_patterns(patterns, properties, others, path)
        prepared: Schema = {"type": "object"}
        if properties:
            prepared["properties"] = {
                name: self._schema(one, f"{path}.properties.{name}", depth + 1) for name, one in properties.items()
            }
        if required:
            prepared["required"] = required
        if patterns:
            prepared["patternProperties"] = {
                pattern: self._schema(one, f"{path}.patternProperties", depth + 1)
                for pattern, one in patterns.items()
            }
        if has_names:
            prepared["propertyNames"] = self._schema(
                names, f"{path}.propertyNames", depth + 1, default_type="string"
            )
        is_closed = others is False or has_names
        prepared["additionalProperties"] = (
            False if is_closed else self._schema(others, f"{path}.additionalProperties", depth + 1)
        )
        return prepared | _given(minProperties=fewest or None, maxProperties=most)

    def _required(self, schema: Schema, properties: Schema, others: Any, path: str) -> list[str]:
        """Returns the required names, after adding those that are not declared to ``properties``."""
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise refusal(path, f"has required {shortened(required)}; it must be a list of names")
        for name in required:
            if name not in properties and others is False:
                raise refusal(path, f"requires {shortened(name)}, which is not one of its properties")
            properties.setdefault(name, others)
        return list(dict.fromkeys(required))


def _types(value: Any, path: str) -> list[str]:
    types = value if isinstance(value, list) else [value]
    if not types or any(one not in TYPES for one in types):
        raise refusal(path, f"has type {shortened(value)}; it must be one or more of {', '.join(TYPES)}")
    # Whoever takes numbers takes integers, too.
    return [one for one in dict.fromkeys(types) if not (one == "integer" and "number" in types)]


def _is_of_type(value: Any, kind: str) -> bool:
    if kind == "integer":
        return (type(value) is int) or (type(value) is float and value.is_integer())
    return type_of(value) == kind


def _check_value(value: Any, path: str) -> None:
    """Raises ``InvalidRequest`` for a value that xgrammar would write as another one."""
    match value:
        case dict():
            for one in value.values():
                _check_value(one, path)
        case list():
            for one in value:
                _check_value(one, path)
        case int() if not -(1 << 63) <= value < 1 << 63:
            raise refusal(path, f"has the integer {shortened(value)}; it must fit 64 bits")
        case float() if not math.isfinite(value):
            raise refusal(path, "has a number that is too large")


def _numbers(schema: Schema, path: str) -> Schema:
    limits = {name: schema[name] for name in KEYWORDS["number"] if name in schema}
    for name, value in limits.items():
        if type(value) not in (int, float):
            raise refusal(path, f"has {name} {shortened(value)}; it must be a number")
        _check_value(value, path)
    return limits


def _size(schema: Schema, name: str, path: str) -> int | None:
    value = schema.get(name)
    if value is None and name not in schema:
        return None
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value <= MAX_SIZE:
        raise refusal(path, f"has {name} {shortened(value)}; it must be a whole number from 0 to {MAX_SIZE}")
    return value


def _check_order(fewest: int, most: int | None, name: str, path: str) -> None:
    if most is not None and fewest > most:
        raise refusal(path, f"has {name} {fewest} above its maximum, {most}")


def _mapping(schema: Schema, name: str, path: str) -> Schema:
    """Returns a copy of a map of schemas; empty if it is not given."""
    value = schema.get(name, {})
    if not isinstance(value, dict):
        raise refusal(path, f"has {name} {shortened(value)}; it must be an object")
    return dict(value)


def _check_patterns(patterns: Mapping[str, Any], properties: Mapping[str, Any], others: Any, path: str) -> None:
    """Raises ``InvalidRequest`` if a name may belong to two schemas, of which a grammar would enforce one."""
    if not patterns:
        return
    if len(patterns) > 1 or others is not False:
        raise refusal(path, "has patternProperties beside other names of any kind; use one pattern without them")
    (pattern,) = patterns
    try:
        matcher = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise refusal(path, f"has the pattern {shortened(pattern)}: {error}") from None
    for name in properties:
        if matcher.search(name) is not None:
            raise refusal(path, f"has the property {shortened(name)}, which also matches patternProperties")


def _given(**settings: int | None) -> dict[str, int]:
    return {name: value for name, value in settings.items() if value is not None}
