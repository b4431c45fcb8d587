"""Tests of tools and typed answers with LiteLLM."""

from __future__ import annotations

import json
import os
from typing import Any

import litellm
import pytest
from pydantic import BaseModel

from support.errands import ERRANDS, ONE_CALL, PARCEL, SYSTEM, Errand, Tools, definitions

SETTINGS: dict[str, Any] = {
    "model": "openai/embedded",
    "api_base": os.environ["SERVER"] + "/v1",
    "api_key": os.environ["KEY"],
    "max_tokens": 200,
    "temperature": 0,
    "num_retries": 0,
    "max_retries": 0,
}


class Parcel(BaseModel):
    colour: str
    count: int


def answer(messages: list[Any], *, is_streamed: bool) -> Any:
    reply = litellm.completion(messages=messages, tools=definitions(), stream=is_streamed, **SETTINGS)
    return (litellm.stream_chunk_builder(list(reply)) if is_streamed else reply).choices[0]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("errand", ERRANDS)
def test_an_errand(errand: Errand, is_streamed: bool) -> None:
    tools = Tools()
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": errand.user}]
    while (choice := answer(messages, is_streamed=is_streamed)).message.tool_calls:
        assert choice.finish_reason == "tool_calls"
        messages.append(choice.message)
        for call in choice.message.tool_calls:
            result = tools.run(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    errand.check(tools, choice.message.content)


def test_a_demanded_call() -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ONE_CALL.user}]
    reply = litellm.completion(messages=messages, tools=definitions(), tool_choice="required", **SETTINGS)
    (call,) = reply.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ONE_CALL.calls[0]


def test_a_typed_answer() -> None:
    messages = [{"role": "user", "content": PARCEL}]
    reply = litellm.completion(messages=messages, response_format=Parcel, **SETTINGS)
    assert Parcel.model_validate_json(reply.choices[0].message.content) == Parcel(colour="red", count=12)
