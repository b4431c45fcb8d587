"""``/v1/responses`` over HTTP, with a runtime that echoes the prompt."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support import site_requests
from support.scripted_runtime import Site

ANSWER = (
    "<think>\nI run ls.\n</think>\n\nLook: "
    '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "ls"}}\n</tool_call>'
)
CODEX = json.loads((Path(__file__).parent / "codex.json").read_text())


post = partial(site_requests.post, path="/v1/responses", model="echo", input="Hi", max_output_tokens=5)


def test_a_text_is_answered(site: Site) -> None:
    response = post(site, instructions="Be kind.", metadata={"a": "b"})
    assert (response["object"], response["model"], response["metadata"]) == ("response", "echo", {"a": "b"})
    assert (response["store"], response["previous_response_id"]) == (False, None)
    (item,) = response["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert item["content"] == [{"type": "output_text", "text": "<syst", "annotations": [], "logprobs": []}]
    assert response["usage"]["input_tokens"] == len("<system>Be kind.<user>Hi<assistant>")
    assert response["usage"]["output_tokens"] == 5


def test_the_response_repeats_what_the_request_asks_for(site: Site) -> None:
    asked = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    response = post(site, text={"verbosity": "low", "format": asked}, truncation="auto")
    assert (response["text"]["format"], response["truncation"]) == (asked, "auto")
    response = post(site, text={"verbosity": "low"})
    assert (response["text"]["format"], response["truncation"]) == ({"type": "text"}, "disabled")


def test_a_prompt_that_does_not_fit_is_never_cut(site: Site) -> None:
    for truncation in ("auto", "disabled"):
        body = {"input": [{"role": "user", "content": "a" * 300}] * 2, "truncation": truncation}
        reply = site.http.post("/v1/responses", json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_the_whole_prompt_and_breakpoints_are_pinned(site: Site) -> None:
    marked = {"type": "input_text", "text": "Hi", "prompt_cache_breakpoint": {"mode": "explicit"}}
    post(site, input=[{"role": "user", "content": [marked]}], prompt_cache_options={"ttl": "5m"})
    pins = [(pin.n_tokens, pin.ttl_s) for pin in site.loop.submitted[-1].pins]
    assert pins == [(len("<user>Hi"), 300.0), (len("<user>Hi<assistant>"), 300.0)]


def test_a_model_without_a_format_of_calls_says_so(site: Site) -> None:
    reply = site.http.post("/v1/responses", json=CODEX)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")


def test_reasoning_text_and_calls_are_items(agent_site: Site) -> None:
    response = post(agent_site, max_output_tokens=200, tools=CODEX["tools"], input=ANSWER, include=CODEX["include"])
    reasoning, message, call = response["output"]
    assert reasoning["content"][0]["text"].strip() == "I run ls."
    assert message["content"][0]["text"].strip() == "Look:"
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call",
        "exec_command",
        {"cmd": "ls"},
    )
    assert response["status"] == "completed"
    again = [*response["output"], {"type": "function_call_output", "call_id": call["call_id"], "output": "a.py"}]
    assert post(agent_site, input=[*again, {"role": "user", "content": "Hi"}], tools=CODEX["tools"])["output"]


def test_a_body_of_codex_is_answered(agent_site: Site) -> None:
    body = {**CODEX, "max_output_tokens": 3}
    with agent_site.http.stream("POST", "/v1/responses", json=body) as reply:
        assert reply.status_code == 200
        lines = list(reply.iter_lines())
    events = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert events[:2] == ["response.created", "response.in_progress"]
    assert events[-1] == "response.incomplete"
    assert "data: [DONE]" not in lines


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": "a" * 600}, "input"),
        ({"max_output_tokens": 600}, "max_output_tokens"),
        ({"temperature": 1000}, "temperature"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"model": "other"}, "model"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_is_refused_by_name(site: Site, changes: dict[str, Any], param: str, stream: bool) -> None:
    reply = site.http.post("/v1/responses", json={"input": "Hi", "stream": stream, **changes})
    assert reply.status_code in (400, 404)
    assert reply.json()["error"]["param"] == param
    assert post(site)["status"] == "incomplete"
