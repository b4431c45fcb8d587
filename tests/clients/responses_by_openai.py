"""Tests of ``/v1/responses`` with the installed major version of the openai package."""

from __future__ import annotations

import asyncio
import os

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

SERVER = {"base_url": os.environ["SERVER"] + "/v1", "api_key": os.environ["KEY"], "max_retries": 0, "timeout": 60}
SETTINGS = {
    "model": "embedded",
    "instructions": "You are a helpful assistant.",
    "input": "How much is 2 + 2?",
    "max_output_tokens": 12,
    "store": False,
}


@pytest.fixture(scope="module")
def client() -> OpenAI:
    return OpenAI(**SERVER)


def test_a_response(client: OpenAI) -> None:
    response = client.responses.create(**SETTINGS, temperature=0)
    assert (response.object, response.status) == ("response", "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text
    assert (response.usage.output_tokens, response.usage.total_tokens) == (12, response.usage.input_tokens + 12)
    items = [{"role": "user", "content": [{"type": "input_text", "text": SETTINGS["input"]}]}]
    same = client.responses.create(**SETTINGS | {"input": items}, temperature=0)
    assert same.output_text == response.output_text
    assert same.usage.input_tokens_details.cached_tokens > 0


def test_a_stream_is_the_whole_response(client: OpenAI) -> None:
    whole = client.responses.create(**SETTINGS, temperature=0)
    events = list(client.responses.create(**SETTINGS, temperature=0, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text == whole.output_text


def test_the_stream_helper_collects_the_response(client: OpenAI) -> None:
    whole = client.responses.create(**SETTINGS, temperature=0)
    settings = {name: value for name, value in SETTINGS.items() if name != "store"}
    with client.responses.stream(**settings, temperature=0) as stream:
        kinds = {event.type for event in stream}
    assert {"response.output_item.added", "response.content_part.added", "response.output_text.done"} <= kinds
    assert whole.output_text


def test_items_of_an_answer_are_sent_back(client: OpenAI) -> None:
    first = client.responses.create(**SETTINGS, temperature=0)
    call = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 2, "b": 2}'}
    items = [
        {"role": "user", "content": SETTINGS["input"]},
        *[item.model_dump(exclude_none=True) for item in first.output],
        call,
        {"type": "function_call_output", "call_id": "call_1", "output": "4"},
    ]
    second = client.responses.create(**SETTINGS | {"input": items}, temperature=0)
    assert second.output_text
    assert second.usage.input_tokens > first.usage.input_tokens


def test_what_needs_a_store_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**SETTINGS, previous_response_id="resp_1")
    assert raised.value.param == "previous_response_id"
    assert client.responses.create(**SETTINGS).output_text


def test_many_at_once() -> None:
    async def run() -> list[str]:
        async with AsyncOpenAI(**SERVER) as client:
            responses = [client.responses.create(**SETTINGS, temperature=0) for _ in range(8)]
            return [response.output_text for response in await asyncio.gather(*responses)]

    assert len(set(asyncio.run(run()))) == 1
