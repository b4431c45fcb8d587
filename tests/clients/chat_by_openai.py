"""Tests of ``/v1/chat/completions`` with the installed major version of the openai package."""

from __future__ import annotations

import asyncio
import os

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "How much is 2 + 2?"},
]
SERVER = {"base_url": os.environ["SERVER"] + "/v1", "api_key": os.environ["KEY"], "max_retries": 0, "timeout": 60}
SETTINGS = {"model": "embedded", "messages": MESSAGES, "max_completion_tokens": 12}


@pytest.fixture(scope="module")
def client() -> OpenAI:
    return OpenAI(**SERVER)


def test_an_answer(client: OpenAI) -> None:
    reply = client.chat.completions.create(**SETTINGS, temperature=0)
    (choice,) = reply.choices
    assert reply.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert reply.usage.completion_tokens == 12
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 12
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in MESSAGES]
    same = client.chat.completions.create(**SETTINGS | {"messages": parts}, temperature=0)
    assert same.choices[0].message.content == choice.message.content
    assert same.usage.prompt_tokens_details.cached_tokens > 0


def test_a_turn_of_a_session(client: OpenAI) -> None:
    assert client.chat.completions.create(**SETTINGS, extra_body={"session_id": "mine"}).choices
    closed = client.post("/../sessions/mine/close", cast_to=object)
    assert closed["pages_demoted"]["device"] > 0
    with pytest.raises(openai.NotFoundError):
        client.post("/../sessions/mine/close", cast_to=object)


def test_max_tokens_is_the_older_name(client: OpenAI) -> None:
    reply = client.chat.completions.create(model="embedded", messages=MESSAGES, max_tokens=3)
    assert reply.usage.completion_tokens == 3


def test_a_stream_is_the_whole_answer_in_pieces(client: OpenAI) -> None:
    whole = client.chat.completions.create(**SETTINGS, seed=7)
    *pieces, last = client.chat.completions.create(
        **SETTINGS, seed=7, stream=True, stream_options={"include_usage": True}
    )
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == "length"
    assert all(piece.choices[0].finish_reason is None for piece in pieces[:-1])
    assert (last.choices, last.usage.completion_tokens) == ([], 12)


def test_a_stream_that_is_closed_early_and_another_after_it(client: OpenAI) -> None:
    with client.chat.completions.create(**SETTINGS | {"max_completion_tokens": 400}, stream=True) as stream:
        next(iter(stream))
    assert client.chat.completions.create(**SETTINGS).choices


def test_several_choices(client: OpenAI) -> None:
    reply = client.chat.completions.create(**SETTINGS, n=3, seed=1)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in reply.choices}) == 3
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**SETTINGS, n=3, seed=1, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in reply.choices]


def test_logprobs(client: OpenAI) -> None:
    (choice,) = client.chat.completions.create(**SETTINGS, temperature=0, logprobs=True, top_logprobs=3).choices
    tokens = choice.logprobs.content
    assert len(tokens) == 12
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.token == token.top_logprobs[0].token
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)
    assert b"".join(bytes(token.bytes) for token in tokens).decode(errors="replace") == choice.message.content


def test_stop(client: OpenAI) -> None:
    settings = SETTINGS | {"max_completion_tokens": 24, "temperature": 0}
    text = client.chat.completions.create(**settings).choices[0].message.content
    stop = next(text[i : i + 3] for i in range(4, len(text) - 3) if "�" not in text[i : i + 3])
    (choice,) = client.chat.completions.create(**settings, stop=stop).choices
    assert choice.message.content == text[: text.index(stop)]
    assert choice.finish_reason == "stop"


def test_many_streams_of_one_async_client() -> None:
    async def stream(client: AsyncOpenAI, seed: int) -> str:
        chunks = await client.chat.completions.create(**SETTINGS, seed=seed, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def all_streams() -> list[str]:
        async with AsyncOpenAI(**SERVER) as client:
            together = await asyncio.gather(*(stream(client, seed % 8) for seed in range(24)))
            assert together[:8] == [await stream(client, seed) for seed in range(8)]
            return together

    texts = asyncio.run(all_streams())
    assert texts == texts[:8] * 3
    assert len(set(texts)) == 8


def test_cache_options_and_breakpoints(client: OpenAI) -> None:
    system, user = MESSAGES
    marker = {"mode": "explicit", "ttl": "12h"}
    marked = {"type": "text", "text": system["content"] * 20, "prompt_cache_breakpoint": marker}
    messages = [{"role": "system", "content": [marked]}, user]
    options = {"mode": "implicit", "ttl": "30m"}
    # Older versions of the package have no such parameter, but send it in extra_body.
    body = {"prompt_cache_options": options, "prompt_cache_key": "k", "prompt_cache_retention": "24h"}
    given = body if os.environ["CLIENT"] == "openai-3" else {"extra_body": body}
    for _ in range(2):
        reply = client.chat.completions.create(**SETTINGS | {"messages": messages}, **given)
    found = client.post("../cache/explain", cast_to=object, body={"messages": messages})
    assert found["pinned"]["tokens"] > reply.usage.prompt_tokens - 16
    assert 1700 < found["pinned"]["seconds_left"] <= 1800
    ended = client.post("../cache/pin", cast_to=object, body={"messages": messages, "ttl": "0s"})
    assert 0 < ended["pinned_tokens"] < found["pinned"]["tokens"], "the breakpoint's pin stays"
    assert ended["seconds_left"] > 11 * 3600


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"extra_body": {"prompt_cache_options": {"ttl": "abc"}}}, "prompt_cache_options"),
        ({"extra_body": {"prompt_cache_options": {"mode": "sometimes"}}}, "prompt_cache_options"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)
def test_a_bad_value_is_a_bad_request_that_names_it(client: OpenAI, settings: dict, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**SETTINGS | settings)
    assert caught.value.param == param


def test_an_unknown_model_and_a_wrong_key(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**SETTINGS | {"model": "gpt-4"})
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-another").chat.completions.create(**SETTINGS)
