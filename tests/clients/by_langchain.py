"""Tests with langchain-openai's chat model and completion model."""

from __future__ import annotations

import asyncio
import os

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

SERVER = {
    "model": "embedded",
    "base_url": os.environ["SERVER"] + "/v1",
    "api_key": os.environ["KEY"],
    "max_retries": 0,
    "max_tokens": 10,
    "seed": 5,
}
MESSAGES = [SystemMessage("You are a helpful assistant."), HumanMessage("How much is 2 + 2?")]


def test_invoke_and_stream() -> None:
    chat = ChatOpenAI(**SERVER, stream_usage=True)
    answer = chat.invoke(MESSAGES)
    assert answer.content
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.usage_metadata["output_tokens"] == 10
    chunks = list(chat.stream(MESSAGES))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.usage_metadata["output_tokens"] == 10
    assert whole.usage_metadata["input_token_details"]["cache_read"] > 0


def test_batch_and_async() -> None:
    chat = ChatOpenAI(**SERVER)
    questions = [[HumanMessage(f"How much is {i} + {i}?")] for i in range(6)]
    answers = [answer.content for answer in chat.batch(questions)]
    assert answers == [chat.invoke(question).content for question in questions]
    assert answers == [answer.content for answer in asyncio.run(chat.abatch(questions))]


def test_stop_and_logprobs() -> None:
    chat = ChatOpenAI(**SERVER, logprobs=True, top_logprobs=2)
    answer = chat.invoke(MESSAGES)
    assert len(answer.response_metadata["logprobs"]["content"]) == 10
    text = answer.content
    stop = next(text[i : i + 2] for i in range(2, len(text) - 2) if "�" not in text[i : i + 2])
    stopped = chat.invoke(MESSAGES, stop=[stop])
    assert stopped.content == text[: text.index(stop)]
    assert stopped.response_metadata["finish_reason"] == "stop"


def test_the_completion_model() -> None:
    llm = OpenAI(**SERVER)
    text = llm.invoke("The rain in Spain")
    assert text
    assert "".join(llm.stream("The rain in Spain")) == text
    assert llm.batch(["The rain in Spain", "The rain in Rome"])[0] == text


def test_errors_are_those_of_openai() -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ChatOpenAI(**SERVER, top_p=2.0).invoke(MESSAGES)
    assert caught.value.param == "top_p"
    with pytest.raises(ContextOverflowError):
        ChatOpenAI(**SERVER).invoke("x " * 100_000)
    with pytest.raises(openai.AuthenticationError):
        ChatOpenAI(**SERVER | {"api_key": "sk-another"}).invoke(MESSAGES)
