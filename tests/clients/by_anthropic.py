"""Tests of ``/v1/messages`` with Anthropic's own package."""

from __future__ import annotations

import asyncio
import os

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

SERVER = {"base_url": os.environ["SERVER"], "api_key": os.environ["KEY"], "max_retries": 0, "timeout": 60}
SETTINGS = {
    "model": "embedded",
    "max_tokens": 12,
    "extra_body": {"temperature": 0},
    "system": "You are a helpful assistant.",
    "messages": [{"role": "user", "content": "How much is 2 + 2?"}],
}


@pytest.fixture(scope="module")
def client() -> Anthropic:
    return Anthropic(**SERVER)


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message(client: Anthropic) -> None:
    message = client.messages.create(**SETTINGS)
    assert (message.type, message.role, message.model) == ("message", "assistant", "embedded")
    assert text_of(message)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 12)
    blocks = [{"type": "text", "text": SETTINGS["system"], "cache_control": {"type": "ephemeral", "ttl": "5m"}}]
    same = client.messages.create(**SETTINGS | {"system": blocks})
    assert text_of(same) == text_of(message)
    assert same.usage.cache_read_input_tokens > 0


def test_a_stream_is_the_whole_message(client: Anthropic) -> None:
    whole = client.messages.create(**SETTINGS)
    with client.messages.stream(**SETTINGS) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == text_of(final) == text_of(whole)
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
    assert final.usage.cache_read_input_tokens > 0
    usage = final.usage
    n_prompt = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    counted = client.messages.count_tokens(**{key: SETTINGS[key] for key in ("model", "system", "messages")})
    assert counted.input_tokens == n_prompt


def test_a_stream_that_is_closed_early(client: Anthropic) -> None:
    with client.messages.stream(**SETTINGS | {"max_tokens": 400}) as stream:
        next(iter(stream))
    assert client.messages.create(**SETTINGS).content


def test_a_conversation_with_tools_in_its_history(client: Anthropic) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 2, "b": 2}}
    messages = [
        *SETTINGS["messages"],
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm", "signature": ""}, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "4"}]},
    ]
    assert client.messages.create(**SETTINGS | {"messages": messages}).content


def test_a_stop_sequence(client: Anthropic) -> None:
    whole = text_of(client.messages.create(**SETTINGS))
    message = client.messages.create(**SETTINGS, stop_sequences=[whole[3:5]])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", whole[3:5])
    assert whole.startswith(text_of(message))


def test_errors_are_those_of_the_package(client: Anthropic) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(**SETTINGS | {"messages": [{"role": "user", "content": [image]}]})
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**SETTINGS | {"model": "other"})
    with pytest.raises(anthropic.AuthenticationError):
        Anthropic(**SERVER | {"api_key": "no"}).messages.create(**SETTINGS)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**SETTINGS | {"messages": [{"role": "user", "content": "a b " * 20_000}]})


def test_many_at_once() -> None:
    async def run() -> list[anthropic.types.Message]:
        async with AsyncAnthropic(**SERVER) as client:
            return await asyncio.gather(*[client.messages.create(**SETTINGS) for _ in range(8)])

    assert len({text_of(message) for message in asyncio.run(run())}) == 1
