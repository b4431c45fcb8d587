"""Each field that says what the answer must match reaches the runtime."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from radixkv.frontend.api.openai.schema import parse_chat, parse_completion
from radixkv.frontend.api.openai.translation import completion_prompts, to_chat
from radixkv.frontend.chat import chat_prompt
from radixkv.frontend.served_model import ServedModel
from radixkv.wire.structured_outputs import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"const": "é"}}}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}

GIVEN: list[tuple[dict[str, Any], StructuredOutputs | None]] = [
    ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
            }
        },
        StructuredOutputs(json=json.dumps(SCHEMA)),
    ),
    ({"response_format": TAG}, StructuredOutputs(structural_tag=json.dumps(TAG))),
    ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json=json.dumps(SCHEMA))),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, StructuredOutputs(json=json.dumps(SCHEMA))),
    ({"structured_outputs": {"json": {}}}, StructuredOutputs(json="{}")),
    ({"structured_outputs": {"json": False}}, StructuredOutputs(json="false")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
        StructuredOutputs(json="false"),
    ),
    ({"structured_outputs": {"json": ""}}, None),
    ({"structured_outputs": {"json_object": True, "regex": None}}, StructuredOutputs(json_object=True)),
    ({"structured_outputs": {"regex": "a|b"}}, StructuredOutputs(regex="a|b")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=("a", "b"))),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, StructuredOutputs(grammar='root ::= "a"')),
    ({"structured_outputs": {"structural_tag": TAG}}, StructuredOutputs(structural_tag=json.dumps(TAG))),
    ({"guided_json": SCHEMA}, StructuredOutputs(json=json.dumps(SCHEMA))),
    ({"guided_json": json.dumps(SCHEMA)}, StructuredOutputs(json=json.dumps(SCHEMA))),
    ({"guided_regex": "a+", "guided_decoding_backend": "xgrammar"}, StructuredOutputs(regex="a+")),
    ({"guided_choice": ["a"], "response_format": {"type": "text"}}, StructuredOutputs(choice=("a",))),
    ({"guided_grammar": 'root ::= "a"'}, StructuredOutputs(grammar='root ::= "a"')),
    ({"json_schema": json.dumps(SCHEMA)}, StructuredOutputs(json=json.dumps(SCHEMA))),
    ({"json_schema": SCHEMA}, StructuredOutputs(json=json.dumps(SCHEMA))),
    ({"json_schema": {}}, StructuredOutputs(json="{}")),
    ({"regex": "a+", "response_format": {"type": "text"}}, StructuredOutputs(regex="a+")),
    ({"ebnf": 'root ::= "a"'}, StructuredOutputs(grammar='root ::= "a"')),
    ({"json_schema": "", "regex": "", "ebnf": None}, None),
    ({"structured_outputs": {}, "response_format": None, "guided_regex": ""}, None),
]


@pytest.mark.parametrize(("fields", "wanted"), GIVEN)
def test_a_field_reaches_the_runtime(
    served_model: ServedModel, fields: dict[str, Any], wanted: StructuredOutputs | None
) -> None:
    completion = parse_completion(json.dumps({"prompt": "a", **fields}).encode(), 100)
    (prompt,) = asyncio.run(completion_prompts(completion, served_model, ""))
    assert prompt.sampling.structured_outputs == wanted

    chat = parse_chat(json.dumps({"messages": [{"role": "user", "content": "a"}], **fields}).encode(), 100)
    prompt = asyncio.run(chat_prompt(to_chat(chat), served_model, "")).submit
    assert prompt.sampling.structured_outputs == wanted
