"""Specifications in a language of xgrammar, checked for what xgrammar would ignore."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec

from radixkv.errors import InvalidRequest
from radixkv.runtime.structured.json_schema import prepare, prepare_schema
from radixkv.structured_outputs import StructuredOutputs

ANY_OBJECT = '{"type": "object", "additionalProperties": {}}'
"""The schema of any JSON object."""


class Source(msgspec.Struct, frozen=True):
    """A checked specification."""

    language: Literal["json", "regex", "grammar", "structural_tag"]
    text: str


def prepare_source(spec: StructuredOutputs) -> Source:
    """Returns the source of a specification. O(length).

    A JSON schema in a structural tag that has ``or_any_object`` beside it becomes that of any object if grammars do
    not enforce it.

    Raises:
        InvalidRequest: a JSON schema is invalid, or has what grammars do not enforce.
    """
    match spec.kind:
        case "json":
            return Source("json", prepare_schema(spec.json or ""))
        case "json_object":
            return Source("json", ANY_OBJECT)
        case "regex":
            return Source("regex", spec.regex or "")
        case "choice":
            return Source("grammar", f"root ::= {' | '.join(_quoted(text) for text in spec.choice)}")
        case "grammar":
            return Source("grammar", spec.grammar or "")
    return Source("structural_tag", _prepare_structural_tag(spec.structural_tag or ""))


def _quoted(text: str) -> str:
    """Returns a text as a literal of xgrammar's EBNF, which has the escapes of JSON."""
    return json.dumps(text, ensure_ascii=False)


def _prepare_structural_tag(text: str) -> str:
    """Returns a structural tag with its JSON schemas prepared."""
    try:
        tag = json.loads(text)
        json.dumps(tag, ensure_ascii=False).encode()
        return json.dumps(_with_prepared_schemas(tag))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"the structural tag is not valid JSON: {type(error).__name__}", param="structured_outputs"
        ) from None


@contextmanager
def _naming_part(begin: str) -> Iterator[None]:
    """Adds to errors of the block in which part of a structural tag they are: there may be a part for each tool."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"{error} (in the part that begins with {begin[:200]!r})", param=error.param) from None


def _with_prepared_schemas(tag: Any) -> Any:
    match tag:
        case {"type": "json_schema", "json_schema": schema, "or_any_object": True}:
            try:
                prepared = prepare(schema)
            except InvalidRequest:
                prepared = json.loads(ANY_OBJECT)
            return {name: one for name, one in tag.items() if name != "or_any_object"} | {"json_schema": prepared}
        case {"type": "json_schema", "json_schema": schema}:
            return tag | {"json_schema": prepare(schema)}
        case {"begin": str(begin), "schema": schema, "end": str()}:  # the older form, in "structures"
            with _naming_part(begin):
                return tag | {"schema": prepare(schema)}
        case {"type": "tag", "begin": str(begin), "content": content}:
            with _naming_part(begin):
                return tag | {"content": _with_prepared_schemas(content)}
        case dict():
            return {name: _with_prepared_schemas(one) for name, one in tag.items()}
        case list():
            return [_with_prepared_schemas(one) for one in tag]
    return tag
