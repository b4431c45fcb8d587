"""Tests of tools and typed answers with Anthropic's own package."""

from __future__ import annotations

import os
from typing import Any

import pytest
from anthropic import Anthropic, beta_tool
from pydantic import BaseModel

from support.errands import ERRANDS, ERRANDS_WITH_SETTINGS, ONE_CALL, PARCEL, SYSTEM, Errand, Tools, definitions

SETTINGS: dict[str, Any] = {"model": "embedded", "max_tokens": 200, "extra_body": {"temperature": 0}}
TOOLS = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"]["parameters"],
    }
    for tool in definitions()
]


class Parcel(BaseModel):
    colour: str
    count: int


@pytest.fixture(scope="module")
def client() -> Anthropic:
    return Anthropic(base_url=os.environ["SERVER"], api_key=os.environ["KEY"], max_retries=0, timeout=60)


@pytest.mark.parametrize(("errand", "is_streamed", "thinks"), ERRANDS_WITH_SETTINGS)
def test_an_errand(client: Anthropic, errand: Errand, is_streamed: bool, thinks: bool) -> None:
    tools = Tools()
    thinking = {"type": "adaptive" if thinks else "disabled"}
    messages: list[Any] = [{"role": "user", "content": errand.user}]
    while True:
        request = {"system": SYSTEM, "messages": messages, "tools": TOOLS, "thinking": thinking, **SETTINGS}
        if is_streamed:
            with client.messages.stream(**request) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**request)
        if thinks:
            assert message.content[0].thinking
        if message.stop_reason != "tool_use":
            break
        calls = [block for block in message.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": tools.run(call.name, call.input)}
            for call in calls
        ]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    block = message.content[-1]
    assert (message.stop_reason, block.type, len(message.content)) == ("end_turn", "text", 1 + thinks)
    errand.check(tools, block.text)


@pytest.mark.parametrize("errand", ERRANDS)
def test_the_tool_runner(client: Anthropic, errand: Errand) -> None:
    tools = Tools()
    message = client.beta.messages.tool_runner(
        system=SYSTEM,
        messages=[{"role": "user", "content": errand.user}],
        tools=[beta_tool(function) for function in tools.functions],
        **SETTINGS,
    ).until_done()
    errand.check(tools, message.content[0].text)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_demanded_call(client: Anthropic, choice: Any) -> None:
    messages = [{"role": "user", "content": ONE_CALL.user}]
    message = client.messages.create(system=SYSTEM, messages=messages, tools=TOOLS, tool_choice=choice, **SETTINGS)
    (call,) = message.content
    assert (call.name, call.input) == ONE_CALL.calls[0]


def test_a_typed_answer(client: Anthropic) -> None:
    messages = [{"role": "user", "content": PARCEL}]
    message = client.messages.parse(messages=messages, output_format=Parcel, **SETTINGS)
    assert message.parsed_output == Parcel(colour="red", count=12)
