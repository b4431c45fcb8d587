"""What the output of an OpenAI request must match, from any of the fields that say it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from radixkv.errors import InvalidRequest, shortened
from radixkv.frontend.api.openai.schema import GenerationRequest
from radixkv.wire.structured_outputs import StructuredOutputs, parse_structured_outputs


def requested_field(request: GenerationRequest) -> tuple[str, StructuredOutputs] | None:
    """Returns the field that says what the output must match, and what it says; None if it may be anything.

    Raises:
        InvalidRequest: a field is invalid, or two of them ask for something; ``param`` names the field.
    """
    found: dict[str, StructuredOutputs] = {}
    for name, parse in _PARSERS.items():
        if (value := getattr(request, name)) is None:
            continue
        try:
            wanted = parse(value)
        except InvalidRequest as error:
            error.param = name
            raise
        if wanted is not None:
            found[name] = wanted
    if len(found) > 1:
        raise InvalidRequest(f"{' and '.join(found)} are given; give one of them", param=list(found)[1])
    return next(iter(found.items()), None)


def _only(field: str) -> Callable[[Any], StructuredOutputs | None]:
    """Returns the parser of a request's field that has the value of one field of ``structured_outputs``."""
    return lambda value: parse_structured_outputs({field: value})


def _response_format(value: Mapping[str, Any]) -> StructuredOutputs | None:
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return StructuredOutputs(json_object=True)
        case {"type": "json_schema", "json_schema": {"schema": dict() | bool() as schema}}:
            return parse_structured_outputs({"json": schema})
        case {"type": "json_schema"}:
            raise InvalidRequest("response_format.json_schema must have a schema, an object")
        case {"type": "structural_tag"}:
            return StructuredOutputs(structural_tag=json.dumps(value))
    if not value:
        return None
    raise InvalidRequest(
        f"response_format.type is {shortened(value.get('type'))}; it must be text, json_object, json_schema or "
        "structural_tag"
    )


_PARSERS: Mapping[str, Callable[[Any], StructuredOutputs | None]] = {
    "structured_outputs": parse_structured_outputs,
    "response_format": _response_format,
    "guided_json": _only("json"),
    "guided_regex": _only("regex"),
    "guided_choice": _only("choice"),
    "guided_grammar": _only("grammar"),
    "json_schema": _only("json"),
    "regex": _only("regex"),
    "ebnf": _only("grammar"),
}
"""Each field with what reads it: vLLM's and OpenAI's, vLLM's older ones, SGLang's."""
