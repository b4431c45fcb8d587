"""What the output of a request must match: a schema, an expression, a choice or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from radixkv.errors import InvalidRequest, UnsupportedFeature, shortened

MAX_SPECIFICATION_BYTES = 1 << 18
"""Largest specification in UTF-8."""

SPECIAL_MARKS = frozenset(
    f"<{name}>"
    for name in (
        *("think", "/think", "|channel", "channel|"),
        *("|start|", "|channel|", "|constrain|", "|message|", "|end|", "|call|"),
        *("|tool_call", "tool_call|", '|"|'),
    )
)
"""Special tokens that structural tags may name by their ids. No other format allows a special token."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """A format that the sampled tokens must match. Exactly one field is set; the names are vLLM's.

    Raises:
        InvalidRequest: no field is set, or several are, or one has a wrong type, or the specification is too large.
    """

    json: str | None = None
    """A JSON schema as JSON text; in Python also as a dict or a class of pydantic. The output is JSON on one line
    that the schema accepts."""
    json_object: bool = False
    """The output is any JSON object."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: tuple[str, ...] = ()
    """The output is one of these texts."""
    grammar: str | None = None
    """A grammar in EBNF (GBNF) whose start rule is ``root``."""
    structural_tag: str | None = None
    """A structural tag of xgrammar, as JSON text or in Python as a dict: free text with parts that begin with a
    trigger and match a schema."""

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        return next(name for name in self.__struct_fields__ if getattr(self, name))

    def __post_init__(self) -> None:
        # msgspec checks types only when decoding; a caller in Python may pass anything.
        values = msgspec.structs.asdict(self)
        for name in ("json", "structural_tag"):
            values[name] = _json_text(name, values[name])
        if isinstance(values["choice"], list):
            values["choice"] = tuple(values["choice"])
        for name, kind in (
            ("json_object", bool),
            ("regex", str | None),
            ("choice", tuple),
            ("grammar", str | None),
        ):
            if not isinstance(values[name], kind):
                raise _invalid(f"structured_outputs.{name} is {shortened(values[name])}; it has the wrong type")
        for name, value in values.items():
            msgspec.structs.force_setattr(self, name, value)
        given = [name for name in self.__struct_fields__ if getattr(self, name)]
        if len(given) != 1:
            raise _invalid(
                f"structured_outputs has {', '.join(given) or 'no field'}; set exactly one of "
                f"{', '.join(self.__struct_fields__)}"
            )
        self._check_texts(given[0])

    def _check_texts(self, name: str) -> None:
        """Raises ``InvalidRequest`` if the field is too large, or has what is no text."""
        if name == "json_object":
            return
        value = getattr(self, name)
        n_bytes = 0
        for text in value if isinstance(value, tuple) else (value,):
            try:
                n_bytes += len(text.encode())
            except (AttributeError, UnicodeEncodeError):
                raise _invalid(f"structured_outputs.{name} has {shortened(text)}, which is no text") from None
        if n_bytes > MAX_SPECIFICATION_BYTES:
            raise _invalid(f"structured_outputs.{name} has {n_bytes} bytes; at most {MAX_SPECIFICATION_BYTES}")


def parse_structured_outputs(value: Any) -> StructuredOutputs | None:
    """Returns what a request gives as ``structured_outputs``; None if it asks for nothing.

    Args:
        value: a ``StructuredOutputs``, a mapping, an object with the same attributes such as vLLM's
            ``StructuredOutputsParams`` and ``GuidedDecodingParams``, or None.

    Raises:
        InvalidRequest: as ``StructuredOutputs``.
        UnsupportedFeature: an option is set that radixkv does not have.
    """
    if value is None or isinstance(value, StructuredOutputs):
        return value
    fields = value if isinstance(value, Mapping) else vars(value) if hasattr(value, "__dict__") else None
    if fields is None or isinstance(value, type):
        raise _invalid(f"structured_outputs is {shortened(value)}; it must be an object")
    # The schema {} accepts any JSON, and false none; other empty values ask for nothing.
    given = {name: one for name, one in fields.items() if one or (name == "json" and one not in (None, ""))}
    for name in given:
        if name not in StructuredOutputs.__struct_fields__ and name not in _OF_NO_EFFECT:
            raise UnsupportedFeature(
                f"structured_outputs.{shortened(name)} is not supported; leave it out", param="structured_outputs"
            )
    wanted = {name: one for name, one in given.items() if name not in _OF_NO_EFFECT}
    return StructuredOutputs(**wanted) if wanted else None


def choice_grammar(texts: Sequence[str]) -> str:
    """Returns a grammar in xgrammar's EBNF, which has the escapes of JSON, that matches one of the texts."""
    return f"root ::= {' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}"


_OF_NO_EFFECT = frozenset({"disable_any_whitespace", "disable_fallback", "backend", "_backend"})
"""Options of vLLM that ask for what radixkv does, or for one of its backends."""


def _json_text(name: str, value: Any) -> str | None:
    """Returns JSON as text, from text, a parsed value or a class with a JSON schema."""
    if value is None or isinstance(value, str):
        return value
    try:
        schema = cast(Any, value).model_json_schema() if isinstance(value, type) else value
        if not isinstance(schema, dict | bool):
            raise TypeError(f"a {type(schema).__name__} is no schema")
        return json.dumps(schema)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        problem = shortened(str(error))
        raise _invalid(f"structured_outputs.{name} is {shortened(value)}, which has no JSON: {problem}") from None


def _invalid(text: str) -> InvalidRequest:
    return InvalidRequest(text, param="structured_outputs")
