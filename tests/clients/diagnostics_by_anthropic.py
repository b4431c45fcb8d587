"""Tests of ``diagnostics`` in ``/v1/messages`` with Anthropic's own package."""

from __future__ import annotations

import os
import urllib.request
import uuid
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

SERVER = {"base_url": os.environ["SERVER"], "max_retries": 0, "timeout": 60}
PAGE_SIZE = 16
RULES = "You are a patient teacher of arithmetic. Show every step of a sum, and name the result at the end. " * 2
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [
    {"name": name, "description": f"Finds the {name} of two numbers.", "input_schema": SCHEMA}
    for name in ("sum", "product")
]
QUESTIONS = ["How much is 2 + 2, and why is it not 5? Explain it slowly.", "Then how much is 3 * 3?"]


@pytest.fixture(scope="module")
def client() -> Anthropic:
    return Anthropic(**SERVER, api_key=os.environ["KEY"])


@pytest.fixture
def conversation() -> dict[str, Any]:
    """A conversation that no other test has."""
    return {
        "model": "embedded",
        "max_tokens": 4,
        "extra_body": {"temperature": 0},
        "system": f"{uuid.uuid4()}. {RULES}",
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": QUESTIONS[0]},
            {"role": "assistant", "content": "It is 4."},
            {"role": "user", "content": QUESTIONS[1]},
        ],
    }


@pytest.fixture(params=["whole", pytest.param("streamed", marks=pytest.mark.nightly)])
def ask(client: Anthropic, request: pytest.FixtureRequest) -> Any:
    """Sends a request that names an earlier message, whole or as a stream."""

    def send(conversation: dict[str, Any], previous: str | None, **changes: Any) -> anthropic.types.Message:
        body = conversation | {"diagnostics": {"previous_message_id": previous}} | changes
        if request.param == "whole":
            return client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            events = list(stream)
            final = stream.get_final_message()
        (start,) = [event for event in events if event.type == "message_start"]
        assert start.message.diagnostics == final.diagnostics
        return final

    return send


def reason(message: anthropic.types.Message) -> anthropic.types.CacheMissReason:
    assert message.diagnostics is not None
    assert message.diagnostics.cache_miss_reason is not None
    return message.diagnostics.cache_miss_reason


def flush() -> None:
    headers = {"x-api-key": os.environ["KEY"]}
    flushing = urllib.request.Request(f"{SERVER['base_url']}/flush_cache", method="POST", headers=headers)
    with urllib.request.urlopen(flushing, timeout=60) as reply:
        assert reply.status == 200


def n_prompt(message: anthropic.types.Message) -> int:
    usage = message.usage
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def test_nothing_is_said_of_a_conversation_that_goes_on(ask: Any, conversation: dict[str, Any]) -> None:
    first = ask(conversation, None)
    assert first.diagnostics is None
    assert ask(conversation, first.id).diagnostics is None, "a repeated request"
    more = [{"role": "assistant", "content": first.content}, {"role": "user", "content": QUESTIONS[0]}]
    second = ask(conversation, first.id, messages=[*conversation["messages"], *more])
    assert second.diagnostics is None
    assert second.usage.cache_read_input_tokens > 100
    # A breakpoint that moves is no change.
    system = [{"type": "text", "text": conversation["system"], "cache_control": {"type": "ephemeral"}}]
    tools = [TOOLS[0], TOOLS[1] | {"cache_control": {"type": "ephemeral"}}]
    assert (
        ask(
            conversation, second.id, system=system, tools=tools, messages=[*conversation["messages"], *more, *more]
        ).diagnostics
        is None
    )


@pytest.mark.parametrize("changed", ["system", "tools", "messages"])
def test_the_first_part_that_changed_is_named(ask: Any, conversation: dict[str, Any], changed: str) -> None:
    first = ask(conversation, None)
    messages = conversation["messages"]
    edited = [messages[0] | {"content": "How much is 7 + 7? " + QUESTIONS[0]}, *messages[1:]]
    changes = {
        "system": {"system": "Now: " + conversation["system"], "tools": TOOLS[:1], "messages": edited},
        "tools": {"tools": TOOLS[::-1], "messages": edited},
        "messages": {"messages": edited},
    }[changed]
    second = ask(conversation, first.id, **changes)
    found = reason(second)
    assert found.type == f"{changed}_changed"
    n_reusable = n_prompt(first) // PAGE_SIZE * PAGE_SIZE
    assert 0 < found.cache_missed_input_tokens == n_reusable - second.usage.cache_read_input_tokens


def test_a_stream_begins_with_the_diagnostics(client: Anthropic, conversation: dict[str, Any]) -> None:
    first = client.messages.create(**conversation, diagnostics={"previous_message_id": None})
    changed = conversation | {"tools": TOOLS[::-1], "diagnostics": {"previous_message_id": first.id}}
    start, *_, delta, _ = client.messages.create(**changed, stream=True)
    assert reason(start.message).type == "tools_changed"
    n_reusable = n_prompt(first) // PAGE_SIZE * PAGE_SIZE
    n_found = start.message.usage.cache_read_input_tokens
    assert reason(start.message).cache_missed_input_tokens == n_reusable - n_found > 0
    assert delta.usage.cache_miss["matched_tokens"] == n_found, "the true cause comes with the end"


def test_another_name_of_the_model_is_no_change(ask: Any, conversation: dict[str, Any]) -> None:
    first = ask(conversation, None)
    second = ask(conversation, first.id, model="another")
    assert second.diagnostics is None
    assert second.usage.cache_read_input_tokens > 100


def test_messages_that_were_dropped_are_told(ask: Any, conversation: dict[str, Any]) -> None:
    first = ask(conversation, None)
    assert reason(ask(conversation, first.id, messages=conversation["messages"][:1])).type == "messages_changed"
    assert reason(ask(conversation, first.id, messages=conversation["messages"][2:])).type == "messages_changed"


@pytest.mark.parametrize(
    "changes",
    [
        {"tool_choice": {"type": "none"}},
        {"thinking": {"type": "disabled"}},
        {"output_config": {"effort": "low"}},
        {"extra_body": {"temperature": 0, "cache_salt": "mine"}},
    ],
)
def test_other_settings_and_salts_are_no_reasons(
    ask: Any, conversation: dict[str, Any], changes: dict[str, Any]
) -> None:
    first = ask(conversation, None)
    assert reason(ask(conversation, first.id, **changes)).type == "unavailable"


def test_what_has_left_the_cache_is_no_change(ask: Any, client: Anthropic, conversation: dict[str, Any]) -> None:
    first = ask(conversation, None)
    flush()
    second = ask(conversation, first.id)
    assert reason(second).type == "unavailable"
    assert second.usage.cache_read_input_tokens == 0
    flush()
    whole = client.messages.create(**conversation, diagnostics={"previous_message_id": first.id})
    assert whole.usage.cache_miss["reason"] == "never_seen", "the true cause"


def test_unknown_and_foreign_ids_are_not_found(ask: Any, client: Anthropic, conversation: dict[str, Any]) -> None:
    first = ask(conversation, None)
    unasked = client.messages.create(**conversation)
    foreign = Anthropic(**SERVER, api_key="sk-of-a-tenant").messages.create(
        **conversation, diagnostics={"previous_message_id": first.id}
    )
    assert reason(foreign).type == "previous_message_not_found"
    for previous in ("msg_0", "", foreign.id, unasked.id, first.id.replace("msg", "resp")):
        assert reason(ask(conversation, previous)).type == "previous_message_not_found"
    assert ask(conversation, first.id).diagnostics is None


def test_diagnostics_without_an_id_ask_for_nothing(client: Anthropic, conversation: dict[str, Any]) -> None:
    first = client.messages.create(**conversation, diagnostics={})
    assert first.diagnostics is None
    assert client.messages.create(**conversation, diagnostics={"previous_message_id": first.id}).diagnostics is None
    assert client.messages.create(**conversation, diagnostics=None).diagnostics is None
    with pytest.raises(anthropic.BadRequestError, match="previous_message_id"):
        client.messages.create(**conversation, diagnostics={"previous_message_id": 5})


def test_no_token_computes_the_prompt_for_the_cache(client: Anthropic, conversation: dict[str, Any]) -> None:
    warmed = client.messages.create(**conversation | {"max_tokens": 0}, diagnostics={"previous_message_id": None})
    assert (warmed.content, warmed.stop_reason, warmed.usage.output_tokens) == ([], "max_tokens", 0)
    assert warmed.usage.cache_creation_input_tokens == n_prompt(warmed) // PAGE_SIZE * PAGE_SIZE
    message = client.messages.create(**conversation, diagnostics={"previous_message_id": warmed.id})
    assert message.diagnostics is None
    assert message.content
    assert message.usage.cache_read_input_tokens >= (n_prompt(warmed) - 1) // PAGE_SIZE * PAGE_SIZE


@pytest.mark.parametrize(
    "asked",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool", "name": "sum"}},
    ],
)
def test_no_token_is_refused_with_what_asks_for_an_answer(
    client: Anthropic, conversation: dict[str, Any], asked: dict[str, Any]
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=next(iter(asked))):
        client.messages.create(**conversation | {"max_tokens": 0}, **asked)
    with pytest.raises(anthropic.BadRequestError, match="stream"):
        client.messages.create(**conversation | {"max_tokens": 0}, stream=True)
