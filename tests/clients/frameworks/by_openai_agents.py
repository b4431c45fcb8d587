"""Tests with agents of openai-agents, over ``/v1/responses`` and over ``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel

from support.errands import ERRANDS, ONE_CALL, PARCEL, SYSTEM, TWO_CALLS_IN_A_ROW, Errand, Tools

MODELS = [OpenAIResponsesModel, OpenAIChatCompletionsModel]
SERVER = {"base_url": os.environ["SERVER"] + "/v1", "api_key": os.environ["KEY"], "max_retries": 0, "timeout": 60}

pytestmark = [pytest.mark.parametrize("model", MODELS)]


class Parcel(BaseModel):
    colour: str
    count: int


def agent(model: type, tools: Tools, **settings: object) -> Agent:
    return Agent(
        name="errands",
        instructions=SYSTEM,
        model=model(model="embedded", openai_client=AsyncOpenAI(**SERVER)),
        model_settings=ModelSettings(temperature=0, max_tokens=200),
        tools=[function_tool(function) for function in tools.functions],
        **settings,
    )


@pytest.mark.parametrize("errand", ERRANDS)
def test_an_errand(model: type, errand: Errand) -> None:
    tools = Tools()
    result = Runner.run_sync(agent(model, tools), errand.user)
    errand.check(tools, result.final_output)


@pytest.mark.parametrize("errand", ERRANDS)
def test_a_streamed_errand(model: type, errand: Errand) -> None:
    tools = Tools()

    async def run() -> tuple[str, str]:
        result = Runner.run_streamed(agent(model, tools), errand.user)
        deltas = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        return "".join(deltas), result.final_output

    text, answer = asyncio.run(run())
    errand.check(tools, answer)
    assert text == answer


def test_a_conversation_goes_on_from_its_items(model: type) -> None:
    tools = Tools()
    first = Runner.run_sync(agent(model, tools), TWO_CALLS_IN_A_ROW.user)
    TWO_CALLS_IN_A_ROW.check(tools, first.final_output)
    tools.calls.clear()
    items = [*first.to_input_list(), {"role": "user", "content": ONE_CALL.user}]
    second = Runner.run_sync(agent(model, tools), items)
    ONE_CALL.check(tools, second.final_output)
    assert second.raw_responses[0].usage.input_tokens_details.cached_tokens > 100, "the first errand is cached"


def test_reasoning_is_sent_back(model: type) -> None:
    tools = Tools()
    thinker = agent(model, tools)
    thinker.model_settings = replace(
        thinker.model_settings,
        reasoning=Reasoning(effort="low"),
        extra_body={"chat_template_kwargs": {"enable_thinking": True}}
        if model is OpenAIChatCompletionsModel
        else None,
    )
    result = Runner.run_sync(thinker, TWO_CALLS_IN_A_ROW.user)
    TWO_CALLS_IN_A_ROW.check(tools, result.final_output)
    assert [item.type for item in result.new_items].count("reasoning_item") == 3
    last = result.raw_responses[-1].usage
    assert last.input_tokens - last.input_tokens_details.cached_tokens < 100, (
        "the prompt goes on from the one before"
    )


def test_an_output_type(model: type) -> None:
    clerk = agent(model, Tools(), output_type=Parcel)
    clerk.tools.clear()
    assert Runner.run_sync(clerk, PARCEL).final_output == Parcel(colour="red", count=12)
