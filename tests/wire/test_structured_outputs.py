"""What Python callers give as structured outputs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from radixkv import SamplingParams, StructuredOutputs
from radixkv.errors import InvalidRequest
from radixkv.wire.structured_outputs import MAX_SPECIFICATION_BYTES

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}


class Model:
    """Like a class of pydantic."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return SCHEMA


@dataclass
class Params:
    """Like vLLM's ``StructuredOutputsParams``."""

    json: Any = None
    choice: list[str] | None = None
    disable_fallback: bool = False
    whitespace_pattern: str | None = None


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA), Model])
def test_a_schema_is_a_dict_a_text_or_a_class(schema: Any) -> None:
    wanted = StructuredOutputs(json=json.dumps(SCHEMA))

    assert StructuredOutputs(json=schema) == wanted
    assert SamplingParams(structured_outputs={"json": schema}).structured_outputs == wanted
    assert SamplingParams(structured_outputs=Params(json=schema)).structured_outputs == wanted
    assert SamplingParams(guided_decoding=Params(json=schema)).structured_outputs == wanted


def test_it_crosses_the_wire() -> None:
    given: list[dict[str, Any]] = [{"choice": ["a", "b"]}, {"json": {}}, {"json_object": True}]
    for wanted in [StructuredOutputs(**fields) for fields in given]:
        sampling = SamplingParams(structured_outputs=wanted)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams) == sampling
        assert hash(wanted) == hash(msgspec.structs.replace(wanted))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"regex": ""},
        {"regex": "a", "json_object": True},
        {"json": 3},
        {"json": int},
        {"json": {"a": {1, 2}}},
        {"regex": b"a"},
        {"regex": "\ud800"},
        {"choice": "ab"},
        {"choice": [1]},
        {"choice": ["a", True]},
        {"json_object": 1},
        {"grammar": "a" * (MAX_SPECIFICATION_BYTES + 1)},
        {"choice": ["a" * (MAX_SPECIFICATION_BYTES // 2)] * 3},
    ],
)
def test_what_is_no_specification_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutputs(**fields)
    assert caught.value.param == "structured_outputs"
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", [3, "json", SCHEMA, Params, Params(json={}, whitespace_pattern=" ")])
def test_what_is_no_object_of_ours_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(structured_outputs=value)
    assert caught.value.param == "structured_outputs"


def test_what_asks_for_nothing_is_nothing() -> None:
    for value in (None, {}, Params(), {"regex": None, "choice": []}):
        assert SamplingParams(structured_outputs=value).structured_outputs is None
