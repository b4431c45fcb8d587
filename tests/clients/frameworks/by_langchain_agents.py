"""Tests of tools and typed answers with LangChain, whose agents run the loop themselves."""

from __future__ import annotations

import os

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from support.errands import ERRANDS, ONE_CALL, PARCEL, SYSTEM, Errand, Tools


class Parcel(BaseModel):
    """A parcel."""

    colour: str
    count: int


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(request: pytest.FixtureRequest) -> ChatOpenAI:
    return ChatOpenAI(
        model="embedded",
        base_url=os.environ["SERVER"] + "/v1",
        api_key=os.environ["KEY"],
        max_retries=0,
        max_tokens=200,
        temperature=0,
        use_responses_api=request.param,
    )


@pytest.mark.parametrize("errand", ERRANDS)
def test_an_agent(model: ChatOpenAI, errand: Errand) -> None:
    tools = Tools()
    agent = create_agent(model, tools.functions, system_prompt=SYSTEM)
    found = agent.invoke({"messages": [HumanMessage(errand.user)]})
    errand.check(tools, found["messages"][-1].text)


@pytest.mark.parametrize("errand", ERRANDS)
def test_a_streamed_agent(model: ChatOpenAI, errand: Errand) -> None:
    tools = Tools()
    agent = create_agent(model, tools.functions, system_prompt=SYSTEM)
    chunks = agent.stream({"messages": [HumanMessage(errand.user)]}, stream_mode="messages")
    texts = [chunk.text for chunk, _ in chunks if isinstance(chunk, AIMessageChunk)]
    assert len([text for text in texts if text]) > 1
    errand.check(tools, "".join(texts))


@pytest.mark.parametrize("choice", [None, "any", "get_weather"])
def test_bound_tools(model: ChatOpenAI, choice: str | None) -> None:
    bound = model.bind_tools(Tools().functions, tool_choice=choice)
    messages = [SystemMessage(SYSTEM), HumanMessage(ONE_CALL.user)]
    whole = bound.invoke(messages)
    (call,) = whole.tool_calls
    assert (call["name"], call["args"]) == ONE_CALL.calls[0]
    first, *others = bound.stream(messages)
    for chunk in others:
        first += chunk
    assert isinstance(whole, AIMessage)
    assert [(call["name"], call["args"]) for call in first.tool_calls] == [ONE_CALL.calls[0]]


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_a_structured_output(model: ChatOpenAI, method: str) -> None:
    typed = model.with_structured_output(Parcel, method=method)
    assert typed.invoke(PARCEL) == Parcel(colour="red", count=12)
