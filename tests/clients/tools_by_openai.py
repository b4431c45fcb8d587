"""Tests of tools and typed answers with the installed major version of the openai package, over two APIs."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from openai import OpenAI
from pydantic import BaseModel

from support.errands import ERRANDS, ERRANDS_WITH_SETTINGS, ONE_CALL, PARCEL, SYSTEM, Errand, Tools, definitions

CHAT: dict[str, Any] = {"model": "embedded", "temperature": 0, "max_completion_tokens": 200, "tools": definitions()}
RESPONSES: dict[str, Any] = {
    "model": "embedded",
    "temperature": 0,
    "max_output_tokens": 200,
    "instructions": SYSTEM,
    "tools": [{"type": "function", **tool["function"]} for tool in definitions()],
}


class Parcel(BaseModel):
    colour: str
    count: int


@pytest.fixture(scope="module")
def client() -> OpenAI:
    url = os.environ["SERVER"] + "/v1"
    return OpenAI(base_url=url, api_key=os.environ["KEY"], max_retries=0, timeout=60)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("errand", ERRANDS)
def test_an_errand_in_a_chat(client: OpenAI, errand: Errand, is_streamed: bool) -> None:
    tools = Tools()
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": errand.user}]
    while True:
        if is_streamed:
            with client.chat.completions.stream(messages=messages, **CHAT) as stream:
                (choice,) = stream.until_done().get_final_completion().choices
        else:
            (choice,) = client.chat.completions.create(messages=messages, **CHAT).choices
        if not choice.message.tool_calls:
            break
        assert choice.finish_reason == "tool_calls"
        messages.append(choice.message)
        for call in choice.message.tool_calls:
            result = tools.run(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert choice.finish_reason == "stop"
    errand.check(tools, choice.message.content)


@pytest.mark.parametrize(("errand", "is_streamed", "thinks"), ERRANDS_WITH_SETTINGS)
def test_an_errand_by_responses(client: OpenAI, errand: Errand, is_streamed: bool, thinks: bool) -> None:
    tools = Tools()
    settings = RESPONSES | {"reasoning": {"effort": "low" if thinks else "none"}}
    items: list[Any] = [{"role": "user", "content": errand.user}]
    while True:
        if is_streamed:
            with client.responses.stream(input=items, **settings) as stream:
                response = stream.until_done().get_final_response()
        else:
            response = client.responses.create(input=items, **settings)
        items += response.output
        assert (response.output[0].type == "reasoning") == thinks
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            break
        for call in calls:
            output = tools.run(call.name, json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    errand.check(tools, response.output_text)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_demanded_call_in_spite_of_a_format(client: OpenAI, choice: Any) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ONE_CALL.user}]
    reply = client.chat.completions.create(
        messages=messages, tool_choice=choice, response_format={"type": "json_object"}, **CHAT
    )
    (call,) = reply.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ONE_CALL.calls[0]


def test_typed_answers(client: OpenAI) -> None:
    messages = [{"role": "user", "content": PARCEL}]
    settings = {"model": "embedded", "temperature": 0}
    completion = client.chat.completions.parse(messages=messages, response_format=Parcel, **settings)
    assert completion.choices[0].message.parsed == Parcel(colour="red", count=12)
    response = client.responses.parse(input=PARCEL, text_format=Parcel, **settings)
    assert response.output_parsed == Parcel(colour="red", count=12)
    with client.responses.stream(input=PARCEL, text_format=Parcel, **settings) as stream:
        assert stream.until_done().get_final_response().output_parsed == response.output_parsed
    with client.chat.completions.stream(messages=messages, response_format=Parcel, **settings) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == response.output_parsed
