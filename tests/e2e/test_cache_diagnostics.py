"""Cache diagnostics of a real server: the true cause beside them, pins, counts, and restarts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from support.live import LiveServer

Start = Callable[..., AbstractContextManager[LiveServer]]
RULES = "You are a patient teacher of arithmetic. Show every step of a sum, and name the result at the end. " * 2
QUESTION = [{"role": "user", "content": "How much is 2 + 2, and why is it not 5? Explain it slowly."}]


def post(server: LiveServer, path: str, **body: Any) -> Any:
    reply = server.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def message(server: LiveServer, **body: Any) -> Any:
    common = {"max_tokens": 2, "system": RULES, "messages": QUESTION, "diagnostics": {}}
    return post(server, "/v1/messages", **common | body)


def response(server: LiveServer, **body: Any) -> Any:
    return post(
        server, "/v1/responses", **{"max_output_tokens": 2, "instructions": RULES, "input": QUESTION} | body
    )


@pytest.mark.nightly
def test_the_true_cause_stands_beside_what_changed_until_a_restart(start: Start) -> None:
    with start() as server:
        first = message(server)
        edited = {"system": RULES + "Be brief.", "diagnostics": {"previous_message_id": first["id"]}}
        second = message(server, **edited)
        reason, miss = second["diagnostics"]["cache_miss_reason"], second["usage"]["cache_miss"]
        assert reason["type"] == "system_changed"
        assert (miss["reason"], miss["matched_tokens"] % 16) == ("differs", 0)
        assert miss["first_difference"]["position"] >= miss["matched_tokens"]
        assert "Be" in miss["first_difference"]["prompt"]
        asked = response(server, instructions=RULES + "Be kind.", explain_cache=True)
        assert asked["prompt_cache_diagnostics"] is None
        assert asked["usage"]["input_tokens_details"]["cache_miss"]["reason"] == "differs"
        assert "cache_miss" not in message(server, system="Say why.")["usage"], "nobody asks for it"
        counted = server.http.get("/metrics").text
        assert 'radixkv:cache_comparisons_total{result="system"} 1.0' in counted
        assert 'radixkv:cache_comparisons_total{result="same"} 0.0' in counted
    with start() as server:
        again = message(server, diagnostics={"previous_message_id": first["id"]})
        assert again["diagnostics"] == {"cache_miss_reason": {"type": "previous_message_not_found"}}
        again = response(server, prompt_cache_options={"comparison_response_id": asked["id"]})
        assert again["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}
        assert server.metric("kv_pages_pinned") == 0, "a comparison alone pins nothing"
        warmed = response(server, input="Warm.", prompt_cache_options={"prewarm": True})
        assert (warmed["status"], warmed["output"]) == ("completed", [])
        assert server.metric("kv_pages_pinned") == warmed["usage"]["input_tokens"] // 16


@pytest.mark.nightly
def test_without_a_cache_nothing_is_computed_for_it(start: Start) -> None:
    with start("--no-enable-prefix-caching") as server:
        body = {"input": "Hi", "prompt_cache_options": {"prewarm": True}}
        reply = server.http.post("/v1/responses", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt_cache_options")
        reply = server.http.post("/v1/messages", json={"max_tokens": 0, "messages": QUESTION})
        assert reply.status_code == 400
        assert "--no-enable-prefix-caching" in reply.json()["error"]["message"]
        first = message(server)
        second = message(server, diagnostics={"previous_message_id": first["id"]})
        assert second["diagnostics"] == {"cache_miss_reason": {"type": "unavailable"}}
