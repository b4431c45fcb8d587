"""Tests with LlamaIndex: agents of its workflows, and structured predictions."""

from __future__ import annotations

import asyncio
import os

import pytest
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.program.function_program import get_function_tool
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

from support.errands import ERRANDS, PARCEL, SYSTEM, Errand, Tools


class Parcel(BaseModel):
    """A parcel."""

    colour: str
    count: int


@pytest.fixture
def llm() -> OpenAILike:
    return OpenAILike(
        model="embedded",
        api_base=os.environ["SERVER"] + "/v1",
        api_key=os.environ["KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        context_window=8192,
        temperature=0,
        max_tokens=200,
        max_retries=0,
    )


@pytest.mark.parametrize("errand", ERRANDS)
@pytest.mark.parametrize("streaming", [True, False])
def test_an_errand(llm: OpenAILike, errand: Errand, streaming: bool) -> None:
    tools = Tools()

    async def run() -> tuple[str, str]:
        functions = [FunctionTool.from_defaults(function) for function in tools.functions]
        agent = FunctionAgent(tools=functions, llm=llm, system_prompt=SYSTEM, streaming=streaming)
        running = agent.run(errand.user)
        deltas = [event.delta async for event in running.stream_events() if isinstance(event, AgentStream)]
        return "".join(deltas), str(await running)

    streamed, answer = asyncio.run(run())
    errand.check(tools, answer)
    assert streamed == (answer if streaming else "")


def test_a_structured_chat(llm: OpenAILike) -> None:
    reply = llm.as_structured_llm(Parcel).chat([ChatMessage(PARCEL)])
    assert reply.raw == Parcel(colour="red", count=12)


def test_a_demanded_call(llm: OpenAILike) -> None:
    reply = llm.chat_with_tools([get_function_tool(Parcel)], PARCEL, tool_required=True)
    (call,) = llm.get_tool_calls_from_response(reply)
    assert (call.tool_name, call.tool_kwargs) == ("Parcel", {"colour": "red", "count": 12})
