"""Specifications in a language of xgrammar, checked for what xgrammar would ignore."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec

from radixkv.errors import InvalidRequest
from radixkv.runtime.structured.json_schema import prepare, prepare_schema
from radixkv.runtime.structured.pattern_checks import check_patterns
from radixkv.wire.structured_outputs import StructuredOutputs, choice_grammar

ANY_OBJECT = '{"type": "object", "additionalProperties": {}}'
"""The schema of any JSON object."""


class Source(msgspec.Struct, frozen=True):
    """A checked specification."""

    language: Literal["json", "regex", "grammar", "structural_tag"]
    text: str
    before: str = ""
    """What comes before a structural tag's format: another format of xgrammar as JSON text; empty for nothing."""


def prepare_source(spec: StructuredOutputs) -> Source:
    """Returns the source of a specification. O(length).

    Structural tags have three keys besides those of xgrammar. A JSON schema with ``or_any_object`` becomes that of
    any object if grammars do not enforce it. One with ``is_one_line`` has the layout that answers have as a whole.
    The style ``gemma`` is Gemma 4's notation.
    ``before``, beside ``format``, is a format that comes first.

    Raises:
        InvalidRequest: a JSON schema is invalid, or has what grammars or xgrammar do not enforce.
    """
    match spec.kind:
        case "json":
            source = Source("json", prepare_schema(spec.json or ""))
            check_patterns(json.loads(source.text))
            return source
        case "json_object":
            return Source("json", ANY_OBJECT)
        case "regex":
            return Source("regex", spec.regex or "")
        case "choice":
            return Source("grammar", choice_grammar(spec.choice))
        case "grammar":
            return Source("grammar", spec.grammar or "")
    return _prepare_structural_tag(spec.structural_tag or "")


def written_schemas(tag: Any) -> Iterator[dict[str, Any]]:
    """Yields the parts of a structural tag that are JSON schemas whose layout or notation xgrammar's tags lack."""
    match tag:
        case {"type": "json_schema", "is_one_line": True} | {"type": "json_schema", "style": "gemma"}:
            yield tag
        case {"type": "json_schema"}:
            return
        case dict():
            for one in tag.values():
                yield from written_schemas(one)
        case list():
            for one in tag:
                yield from written_schemas(one)


def _prepare_structural_tag(text: str) -> Source:
    """Returns a structural tag with its JSON schemas prepared."""
    try:
        tag = json.loads(text)
        json.dumps(tag, ensure_ascii=False).encode()
        before = json.dumps(tag.pop("before")) if isinstance(tag, dict) and "before" in tag else ""
        return Source("structural_tag", json.dumps(_with_prepared_schemas(tag)), before)
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


def _prepared(schema: Any, style: str = "json") -> Any:
    """Prepares a JSON schema, and checks its patterns where its strings are in quotes."""
    prepared = prepare(schema)
    if style in ("json", "gemma"):
        check_patterns(prepared)
    return prepared


def _with_prepared_schemas(tag: Any) -> Any:
    match tag:
        case {"type": "json_schema", "json_schema": schema, "or_any_object": True}:
            try:
                prepared = _prepared(schema, tag.get("style", "json"))
            except InvalidRequest:
                prepared = json.loads(ANY_OBJECT)
            return {name: one for name, one in tag.items() if name != "or_any_object"} | {"json_schema": prepared}
        case {"type": "json_schema", "json_schema": schema}:
            return tag | {"json_schema": _prepared(schema, tag.get("style", "json"))}
        case {"begin": str(begin), "schema": schema, "end": str()}:  # the older form, in "structures"
            with _naming_part(begin):
                return tag | {"schema": _prepared(schema)}
        case {"type": "tag", "begin": str(begin), "content": content}:
            with _naming_part(begin):
                return tag | {"content": _with_prepared_schemas(content)}
        case {
            "type": "sequence",
            "elements": [{"value": str(begin)} as first, {"json_schema": _} as content, *rest],
        }:
            with _naming_part(begin):
                return tag | {"elements": [first, _with_prepared_schemas(content), *rest]}
        case dict():
            return {name: _with_prepared_schemas(one) for name, one in tag.items()}
        case list():
            return [_with_prepared_schemas(one) for one in tag]
    return tag
