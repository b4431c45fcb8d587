"""``/v1/messages`` and ``/v1/messages/count_tokens`` over HTTP, with a runtime that echoes the prompt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from radixkv.errors import RuntimeDied
from radixkv.frontend.served_model import ServedModel
from radixkv.settings.server_config import ServerConfig
from radixkv.wire.messages import unpack_tokens
from support.running_site import running_site
from support.scripted_runtime import MAX_MODEL_LEN, Site
from support.site_requests import events, post

CLAUDE_CODE = json.loads((Path(__file__).parent / "claude_code.json").read_text())
USER = {"role": "user", "content": "Hi"}


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "echo", "max_tokens": 5, "messages": [USER], **changes}


def answer(site: Site, **changes: Any) -> Any:
    return post(site, "/v1/messages", **body(**changes))


def stream(site: Site, **changes: Any) -> list[dict[str, Any]]:
    return events(site, "/v1/messages", **body(**changes))


def check_error(reply: Any, status: int, kind: str, param: str | None = None) -> None:
    found = reply.json()
    assert (reply.status_code, found["type"], found["error"]["type"]) == (status, "error", kind), reply.text
    assert found["error"]["message"]
    assert found["error"]["param"] == param


def test_a_message_is_answered(site: Site) -> None:
    message = answer(site, system="Be kind.")
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "echo")
    assert message["content"] == [{"type": "text", "text": "<syst"}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    n_prompt = len("<system>Be kind.<user>Hi<assistant>")
    usage = message["usage"]
    assert usage["cache_read_input_tokens"] == n_prompt // 2
    assert usage["cache_creation_input_tokens"] == n_prompt - n_prompt % 16 - n_prompt // 2
    assert sum(usage.values()) == n_prompt + 5


def test_a_stream_begins_with_the_split_of_the_prompt(site: Site) -> None:
    first, *_, end, _ = stream(site, system="Be kind.", max_tokens=9)
    start = first["message"]["usage"]
    assert {**start, "output_tokens": 9} == end["usage"]
    assert start["cache_read_input_tokens"] > 0


def test_a_stop_sequence_ends_the_answer(site: Site) -> None:
    message = answer(site, stop_sequences=["ser"], max_tokens=20)
    assert message["content"] == [{"type": "text", "text": "<u"}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "ser")


ANSWER = (
    "<think>\nI run ls.\n</think>\n\nLook: "
    '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call>'
)


def test_a_model_without_a_format_of_calls_says_so(site: Site) -> None:
    reply = site.http.post("/v1/messages", json=body(tools=CLAUDE_CODE["tools"]))
    check_error(reply, 400, "invalid_request_error", "tools")
    assert "--tool-call-parser" in reply.json()["error"]["message"]


def test_a_body_of_claude_code_is_answered(agent_site: Site) -> None:
    with agent_site.http.stream("POST", "/v1/messages?beta=true", json={**CLAUDE_CODE, "max_tokens": 20}) as reply:
        assert reply.status_code == 200
        events = [line for line in reply.iter_lines() if line.startswith("event: ")]
    assert events[:2] == ["event: message_start", "event: ping"]
    assert events[-1] == "event: message_stop"
    tokens = unpack_tokens(agent_site.loop.submitted[-1].tokens)
    prompt = agent_site.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert "<system>You are Claude Code" in prompt, "without the billing header"
    assert '"name": "Bash"' in prompt
    assert "web_search" not in prompt
    assert agent_site.loop.submitted[-1].pins[-1].ttl_s == 300.0


def test_reasoning_text_and_calls_are_blocks(agent_site: Site) -> None:
    messages = [{"role": "user", "content": ANSWER}]
    message = answer(agent_site, max_tokens=200, tools=CLAUDE_CODE["tools"], messages=messages)
    thinking, text, call = message["content"]
    assert (thinking["type"], thinking["thinking"].strip()) == ("thinking", "I run ls.")
    assert (text["type"], text["text"].strip()) == ("text", "Look:")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "Bash", {"command": "ls"})
    assert call["id"]
    assert message["stop_reason"] == "tool_use"


def test_cache_control_of_the_body_pins_the_whole_prompt(site: Site) -> None:
    answer(site, cache_control={"type": "ephemeral", "ttl": "1h"})
    (pin,) = site.loop.submitted[-1].pins
    assert (pin.n_tokens, pin.ttl_s) == (len("<user>Hi<assistant>"), 3600.0)
    answer(site, cache_control={"type": "ephemeral"})
    assert site.loop.submitted[-1].pins == ()


def test_breakpoints_ask_for_nothing_where_nothing_can_be_pinned(served_model: ServedModel, tmp_path: Path) -> None:
    with running_site(replace(served_model, pins_prompts=False), tmp_path) as site:
        blocks = CLAUDE_CODE["system"]
        assert answer(site, system=blocks, cache_control={"type": "ephemeral", "ttl": "1h"})
        assert site.loop.submitted[-1].pins == ()


def test_counted_tokens_are_those_of_the_message(agent_site: Site) -> None:
    agent = {name: CLAUDE_CODE[name] for name in ("messages", "system", "tools")}
    for changes in ({}, {"system": "Be kind."}, agent):
        counted = agent_site.http.post("/v1/messages/count_tokens", json={"messages": [USER], **changes}).json()
        usage = answer(agent_site, max_tokens=1, **changes)["usage"]
        assert counted == {"input_tokens": sum(usage.values()) - 1}


@pytest.mark.parametrize("n_characters", [MAX_MODEL_LEN, 2 * MAX_MODEL_LEN, 9 * MAX_MODEL_LEN])
def test_a_conversation_longer_than_the_context_is_counted(site: Site, n_characters: int) -> None:
    messages = [{"role": "user", "content": "a" * n_characters}]
    counted = site.http.post("/v1/messages/count_tokens", json={"messages": messages})
    assert counted.json() == {"input_tokens": len("<user><assistant>") + n_characters}


ROOM = MAX_MODEL_LEN - len("<user>Hi<assistant>")


@pytest.mark.parametrize(
    ("max_tokens", "reason"),
    [
        (32_000, "model_context_window_exceeded"),
        ((1 << 31) - 1, "model_context_window_exceeded"),
        ((1 << 53) - 1, "model_context_window_exceeded"),
        (10**30, "model_context_window_exceeded"),
        (ROOM + 1, "model_context_window_exceeded"),
        (ROOM, "max_tokens"),
        (ROOM - 1, "max_tokens"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_ends_with_the_context(site: Site, max_tokens: int, reason: str, streams: bool) -> None:
    if streams:
        (end,) = [event for event in stream(site, max_tokens=max_tokens) if event["type"] == "message_delta"]
        found, usage = end["delta"]["stop_reason"], end["usage"]
    else:
        message = answer(site, max_tokens=max_tokens)
        found, usage = message["stop_reason"], message["usage"]
    assert (found, usage["output_tokens"]) == (reason, min(max_tokens, ROOM))


def test_a_large_max_tokens_changes_no_other_end(site: Site) -> None:
    message = answer(site, max_tokens=32_000, stop_sequences=["ser"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "ser")


def test_the_checkpoints_limit_is_not_the_context(served_model: ServedModel, tmp_path: Path) -> None:
    limited = replace(served_model, default_sampling={"max_new_tokens": 7})
    with running_site(limited, tmp_path) as site:
        message = answer(site, max_tokens=32_000)
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 7)


def test_edits_of_the_conversation_are_accepted_and_none_is_reported(site: Site) -> None:
    edits = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
    assert answer(site, **edits)["context_management"] == {"applied_edits": []}
    assert "context_management" not in answer(site)
    (delta,) = [event for event in stream(site, **edits) if event["type"] == "message_delta"]
    assert delta["context_management"] == {"applied_edits": []}
    counted = site.http.post("/v1/messages/count_tokens", json={"messages": [USER], **edits}).json()
    assert counted["context_management"] == {"original_input_tokens": counted["input_tokens"]}


def test_the_answer_continues_the_last_message(site: Site) -> None:
    usage = answer(site, max_tokens=1, messages=[USER, {"role": "assistant", "content": "Well"}])["usage"]
    assert sum(usage.values()) - 1 == len("<user>Hi<assistant>Well")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "messages"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"cache_salt": "a" * 200}, "cache_salt"),
        ({"container": "a"}, "container"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_a_wrong_field_is_an_error_as_anthropic_writes_it(site: Site, changes: dict[str, Any], param: str) -> None:
    check_error(site.http.post("/v1/messages", json=body(**changes)), 400, "invalid_request_error", param)
    assert answer(site)["type"] == "message"


def test_errors_have_the_types_of_anthropic(site: Site) -> None:
    check_error(site.http.post("/v1/messages", json=body(model="other")), 404, "not_found_error", "model")
    check_error(site.http.post("/v1/messages", content=b"{"), 400, "invalid_request_error")
    check_error(site.http.get("/v1/messages"), 405, "invalid_request_error")
    messages = [{"role": "user", "content": "a" * MAX_MODEL_LEN}]
    too_long = site.http.post("/v1/messages", json=body(messages=messages))
    check_error(too_long, 400, "invalid_request_error", "messages")
    assert "prompt is too long" in too_long.json()["error"]["message"], "by which Claude Code knows it"


@pytest.mark.parametrize("stream", [False, True])
def test_a_thread_is_refused_so_that_clients_send_the_whole_conversation(site: Site, stream: bool) -> None:
    reply = site.http.post("/v1/messages", json=body(thread={"type": "create"}, stream=stream))
    check_error(reply, 400, "invalid_request_error", "thread")
    assert reply.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert site.http.post("/v1/messages", json=body(thread=None)).status_code == 200


def test_an_error_in_the_middle_of_a_stream_is_an_event_with_a_name(
    served_model: ServedModel, tmp_path: Path
) -> None:
    """Anthropic's clients pass over data without the name of an event."""
    with running_site(served_model, tmp_path) as site:
        site.loop.step_s = 0.01
        with site.http.stream("POST", "/v1/messages", json=body(max_tokens=400, stream=True)) as reply:
            lines = reply.iter_lines()
            assert next(lines) == "event: message_start"
            site.events.call_soon_threadsafe(site.client.fail, RuntimeDied("the runtime died"))
            *_, name, data = [line for line in lines if line]
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert (error["type"], error["error"]["message"]) == ("error", "the runtime died")


def test_the_key_may_be_in_the_header_of_anthropic(served_model: ServedModel, tmp_path: Path) -> None:
    with running_site(served_model, tmp_path, ServerConfig(api_key="k")) as site:
        check_error(site.http.post("/v1/messages", json=body()), 401, "authentication_error")
        for headers in ({"x-api-key": "k"}, {"Authorization": "Bearer k"}):
            assert site.http.post("/v1/messages", json=body(), headers=headers).status_code == 200
        for headers in ({"x-api-key": "no"}, {"Authorization": "Bearer no", "x-api-key": "k"}):
            reply = site.http.post("/v1/messages", json=body(), headers=headers)
            check_error(reply, 401, "authentication_error")
