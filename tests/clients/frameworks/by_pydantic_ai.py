"""Tests with agents of pydantic-ai, over OpenAI's two APIs and Anthropic's."""

from __future__ import annotations

import asyncio
import os

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from support.errands import ERRANDS, ONE_CALL, PARCEL, SYSTEM, TWO_CALLS_IN_A_ROW, Errand, Tools

SERVER, KEY = os.environ["SERVER"], os.environ["KEY"]
SETTINGS = {"temperature": 0, "max_tokens": 200}


class Parcel(BaseModel):
    """A parcel."""

    colour: str
    count: int


def open_model(api: str) -> OpenAIChatModel | OpenAIResponsesModel | AnthropicModel:
    if api == "messages":
        client = AsyncAnthropic(base_url=SERVER, api_key=KEY, max_retries=0)
        profile = ModelProfile(supports_json_schema_output=True)  # by default only Anthropic's own models have it
        return AnthropicModel("embedded", provider=AnthropicProvider(anthropic_client=client), profile=profile)
    provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=f"{SERVER}/v1", api_key=KEY, max_retries=0))
    return (OpenAIChatModel if api == "chat" else OpenAIResponsesModel)("embedded", provider=provider)


def open_agent(api: str, tools: Tools) -> Agent:
    return Agent(open_model(api), instructions=SYSTEM, tools=tools.functions, model_settings=SETTINGS)


pytestmark = [pytest.mark.parametrize("api", ["chat", "responses", "messages"])]


@pytest.mark.parametrize("errand", ERRANDS)
def test_an_errand(api: str, errand: Errand) -> None:
    tools = Tools()
    result = open_agent(api, tools).run_sync(errand.user)
    errand.check(tools, result.output)
    assert result.usage.output_tokens > 0


@pytest.mark.parametrize("errand", ERRANDS)
def test_a_streamed_errand(api: str, errand: Errand) -> None:
    tools = Tools()

    async def run() -> list[str]:
        async with open_agent(api, tools).run_stream(errand.user) as result:
            return [text async for text in result.stream_text(delta=True, debounce_by=None)]

    deltas = asyncio.run(run())
    errand.check(tools, "".join(deltas))
    assert len(deltas) > 1


def test_a_conversation_goes_on_from_its_history(api: str) -> None:
    tools = Tools()
    agent = open_agent(api, tools)
    first = agent.run_sync(TWO_CALLS_IN_A_ROW.user)
    tools.calls.clear()
    second = agent.run_sync(ONE_CALL.user, message_history=first.all_messages())
    ONE_CALL.check(tools, second.output)
    assert second.usage.cache_read_tokens > 100, "the first errand is cached"


@pytest.mark.parametrize("kind", [ToolOutput, NativeOutput])
def test_an_output_type(api: str, kind: type) -> None:
    agent = Agent(open_model(api), output_type=kind(Parcel), model_settings=SETTINGS)
    assert agent.run_sync(PARCEL).output == Parcel(colour="red", count=12)
