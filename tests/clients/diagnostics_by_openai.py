"""Tests of ``prompt_cache_diagnostics`` in ``/v1/responses`` with the installed version of the openai package."""

from __future__ import annotations

import os
import urllib.request
import uuid
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response

SERVER = {"base_url": os.environ["SERVER"] + "/v1", "max_retries": 0, "timeout": 60}
PAGE_SIZE = 16
RULES = "You are a patient teacher of arithmetic. Show every step of a sum, and name the result at the end. " * 2
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "name": name, "description": f"Finds the {name} of two numbers.", "parameters": SCHEMA}
    for name in ("sum", "product")
]
QUESTIONS = ["How much is 2 + 2, and why is it not 5? Explain it slowly.", "Then how much is 3 * 3?"]


@pytest.fixture(scope="module")
def client() -> OpenAI:
    return OpenAI(**SERVER, api_key=os.environ["KEY"])


@pytest.fixture
def conversation() -> dict[str, Any]:
    """A conversation that no other test has."""
    return {
        "model": "embedded",
        "max_output_tokens": 4,
        "temperature": 0,
        "instructions": f"{uuid.uuid4()}. {RULES}",
        "tools": TOOLS,
        "input": [
            {"role": "user", "content": QUESTIONS[0]},
            {"role": "assistant", "content": "It is 4."},
            {"role": "user", "content": QUESTIONS[1]},
        ],
    }


@pytest.fixture(params=["whole", pytest.param("streamed", marks=pytest.mark.nightly)])
def ask(client: OpenAI, request: pytest.FixtureRequest) -> Any:
    """Sends a request that names an earlier response, whole or as a stream."""

    def send(conversation: dict[str, Any], compared: str | None, **changes: Any) -> Response:
        body = conversation | changes
        if compared is not None:
            body["prompt_cache_options"] = {"comparison_response_id": compared}
        if request.param == "whole":
            return client.responses.create(**body)
        *_, last = client.responses.create(**body, stream=True)
        assert last.type in ("response.completed", "response.incomplete")
        return last.response

    return send


def n_cached(response: Response) -> int:
    return response.usage.input_tokens_details.cached_tokens


def flush() -> None:
    headers = {"Authorization": f"Bearer {os.environ['KEY']}"}
    flushing = urllib.request.Request(f"{os.environ['SERVER']}/flush_cache", method="POST", headers=headers)
    with urllib.request.urlopen(flushing, timeout=60) as reply:
        assert reply.status == 200


def test_a_conversation_that_goes_on_is_a_hit(ask: Any, conversation: dict[str, Any]) -> None:
    first = ask(conversation, None)
    assert first.prompt_cache_diagnostics is None
    assert first.prompt_cache_options is None
    again = ask(conversation, first.id)
    assert again.prompt_cache_diagnostics.type == "cache_hit"
    assert again.prompt_cache_options.comparison_response_id == first.id
    assert (again.prompt_cache_options.mode, again.prompt_cache_options.ttl) == ("implicit", "30m")
    more = [item.model_dump(exclude_none=True) for item in first.output]
    more.append({"role": "user", "content": QUESTIONS[0]})
    second = ask(conversation, first.id, input=[*conversation["input"], *more])
    assert second.prompt_cache_diagnostics.type == "cache_hit"
    assert n_cached(second) > 100


CHANGES = {
    "prompt_cache_key": {"prompt_cache_key": "another"},
    "service_tier": {"service_tier": "flex"},
    "tools": {"tools": TOOLS[::-1]},
    "text_format": {"text": {"format": {"type": "json_object"}}},
    "reasoning_effort": {"reasoning": {"effort": "low"}},
    "verbosity": {"text": {"verbosity": "low"}},
    "input": {"instructions": "Now: " + RULES},
}
"""What changes each reason's part."""
IN_NO_PROMPT = {"prompt_cache_key", "service_tier", "text_format", "verbosity"}
"""Parts that the prompts of the embedded model do not have."""


@pytest.mark.parametrize("changed", CHANGES)
def test_each_part_that_changed_is_named(ask: Any, conversation: dict[str, Any], changed: str) -> None:
    first = ask(conversation, None)
    found = ask(conversation, first.id, **CHANGES[changed])
    miss = found.prompt_cache_diagnostics
    assert (miss.type, miss.reason) == ("cache_miss", f"{changed}_changed")
    assert miss.comparison_reusable_tokens == first.usage.input_tokens // PAGE_SIZE * PAGE_SIZE
    assert (miss.cache_missed_tokens == 0) == (changed in IN_NO_PROMPT)
    if changed == "tools":
        assert miss.cache_missed_tokens == miss.comparison_reusable_tokens - n_cached(found)


def test_a_stream_ends_with_the_diagnostics(client: OpenAI, conversation: dict[str, Any]) -> None:
    first = client.responses.create(**conversation)
    options = {"comparison_response_id": first.id}
    changed = conversation | {"tools": TOOLS[::-1], "prompt_cache_options": options}
    *_, last = client.responses.create(**changed, stream=True)
    miss = last.response.prompt_cache_diagnostics
    assert (miss.type, miss.reason) == ("cache_miss", "tools_changed")
    assert miss.cache_missed_tokens == miss.comparison_reusable_tokens - n_cached(last.response) > 0


@pytest.mark.nightly
def test_the_first_of_several_parts_is_named(ask: Any, conversation: dict[str, Any]) -> None:
    first = ask(conversation, None)
    names = list(CHANGES)
    for index, name in enumerate(names):
        changes: dict[str, Any] = {}
        for later in names[index:]:
            changes |= CHANGES[later]
        changes["text"] = (
            {"verbosity": "low"} if name in ("reasoning_effort", "verbosity") else changes.get("text", {})
        )
        if index <= names.index("text_format"):
            changes["text"] = {"format": {"type": "json_object"}, "verbosity": "low"}
        assert ask(conversation, first.id, **changes).prompt_cache_diagnostics.reason == f"{name}_changed"


def test_defaults_that_are_written_out_are_no_change(ask: Any, conversation: dict[str, Any]) -> None:
    first = ask(conversation, None)
    defaults = {"service_tier": "auto", "text": {"format": {"type": "text"}, "verbosity": "medium"}}
    assert ask(conversation, first.id, **defaults).prompt_cache_diagnostics.type == "cache_hit"
    text = conversation | {"input": QUESTIONS[0]}
    first = ask(text, None)
    parts = [{"role": "user", "content": [{"type": "input_text", "text": QUESTIONS[0]}]}]
    assert ask(text, first.id, input=parts).prompt_cache_diagnostics.type == "cache_hit"


def test_salts_and_what_has_left_the_cache_are_unavailable(ask: Any, conversation: dict[str, Any]) -> None:
    first = ask(conversation, None)
    other = ask(conversation, first.id, extra_body={"cache_salt": "mine"})
    assert other.prompt_cache_diagnostics.type == "unavailable"
    flush()
    second = ask(conversation, first.id)
    assert second.prompt_cache_diagnostics.type == "unavailable"
    assert second.usage.input_tokens_details.cache_miss["reason"] == "never_seen", "the true cause"


def test_unknown_and_foreign_ids_are_not_found(ask: Any, conversation: dict[str, Any]) -> None:
    first = ask(conversation, None)
    foreign = OpenAI(**SERVER, api_key="sk-of-a-tenant").responses.create(
        **conversation, prompt_cache_options={"comparison_response_id": first.id}
    )
    assert foreign.prompt_cache_diagnostics.type == "comparison_response_not_found"
    for compared in ("resp_0", "", foreign.id, first.id.replace("resp", "msg")):
        assert ask(conversation, compared).prompt_cache_diagnostics.type == "comparison_response_not_found"
    assert ask(conversation, first.id).prompt_cache_diagnostics.type == "cache_hit"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_prompt_is_computed_for_the_cache(client: OpenAI, conversation: dict[str, Any], streamed: bool) -> None:
    body = conversation | {"prompt_cache_options": {"prewarm": True, "ttl": "12h"}, "stream": streamed}
    warmed = client.responses.create(**body)
    if streamed:
        *_, last = warmed
        assert last.type == "response.completed"
        warmed = last.response
    assert (warmed.status, warmed.output, warmed.usage.output_tokens) == ("completed", [], 0)
    n_whole = warmed.usage.input_tokens // PAGE_SIZE * PAGE_SIZE
    assert warmed.usage.input_tokens_details.cache_write_tokens == n_whole
    options = {"comparison_response_id": warmed.id, "prewarm": False}
    answered = client.responses.create(**conversation | {"prompt_cache_options": options})
    assert answered.prompt_cache_diagnostics.type == "cache_hit"
    assert answered.output
    assert n_cached(answered) >= n_whole - PAGE_SIZE


@pytest.mark.parametrize("ttl", ["30m", "12h", "24h"])
def test_a_ttl_is_applied(client: OpenAI, conversation: dict[str, Any], ttl: str) -> None:
    response = client.responses.create(**conversation, prompt_cache_options={"ttl": ttl})
    assert response.prompt_cache_options.ttl == ttl


@pytest.mark.parametrize("ttl", ["25h", "-1h", "soon", ""])
def test_a_ttl_above_the_limit_is_refused(client: OpenAI, conversation: dict[str, Any], ttl: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**conversation, prompt_cache_options={"ttl": ttl})
    assert raised.value.param == "prompt_cache_options"


@pytest.mark.parametrize("option", [{"prewarm": True}, {"comparison_response_id": "resp_1"}])
def test_chats_have_no_such_options(client: OpenAI, option: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    with pytest.raises(openai.BadRequestError, match=next(iter(option))):
        client.chat.completions.create(model="embedded", messages=messages, prompt_cache_options=option)
