"""Tests with LiteLLM, to which the server is an OpenAI-compatible provider."""

from __future__ import annotations

import asyncio
import os

import litellm
import pytest

MESSAGES = [{"role": "user", "content": "How much is 2 + 2?"}]
SETTINGS = {
    "model": "openai/embedded",
    "api_base": os.environ["SERVER"] + "/v1",
    "api_key": os.environ["KEY"],
    "max_tokens": 10,
    "seed": 5,
    "num_retries": 0,
    "max_retries": 0,
}


def test_completion_and_streaming() -> None:
    reply = litellm.completion(messages=MESSAGES, **SETTINGS)
    text = reply.choices[0].message.content
    assert text
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 10
    chunks = list(
        litellm.completion(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **SETTINGS)
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert usages[-1].completion_tokens == 10
    assert usages[-1].prompt_tokens_details.cached_tokens > 0


def test_acompletion_many_at_once() -> None:
    async def stream() -> str:
        chunks = await litellm.acompletion(messages=MESSAGES, stream=True, **SETTINGS)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def all_at_once() -> list[str]:
        whole = await litellm.acompletion(messages=MESSAGES, **SETTINGS)
        streams = await asyncio.gather(*(stream() for _ in range(12)))
        return [whole.choices[0].message.content, *streams]

    assert len(set(asyncio.run(all_at_once()))) == 1


def test_text_completion() -> None:
    settings = SETTINGS | {"model": "text-completion-openai/embedded"}
    reply = litellm.text_completion(prompt="The rain in Spain", **settings)
    assert reply.choices[0].text
    assert reply.usage.completion_tokens == 10


def test_errors_have_their_classes() -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=MESSAGES, **SETTINGS, temperature=-1)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=MESSAGES, **SETTINGS | {"model": "openai/gpt-4"})
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=MESSAGES, **SETTINGS | {"api_key": "sk-another"})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "x " * 100_000}], **SETTINGS)
