"""Requests with a ``kv_budget``, and a server that has one for all, by each API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radixkv.checkpoints import resolve
from support.live import LiveServer, serving

PROMPT = "Question: Ann has 3 apples and buys 4. How many has she?\nAnswer:" * 4
USE = {"kv_budget", "skipped_tokens", "freed_tokens"}


def post(server: LiveServer, path: str, **body: Any) -> Any:
    return server.http.post(path, json=body)


def test_a_request_may_go_on_without_pages(server: LiveServer) -> None:
    exact: Any = server.complete(prompt=PROMPT, max_tokens=60, temperature=0, ignore_eos=True)
    lossy: Any = server.complete(prompt=PROMPT, max_tokens=60, temperature=0, ignore_eos=True, kv_budget=48)
    use = lossy["usage"]["kv_eviction"]
    assert use.keys() == USE
    assert use["kv_budget"] == 48
    assert use["skipped_tokens"] > 0
    assert use["freed_tokens"] > 0
    assert "kv_eviction" not in exact["usage"]
    again: Any = server.complete(prompt=PROMPT, max_tokens=60, temperature=0, ignore_eos=True)
    assert again["choices"][0]["text"] == exact["choices"][0]["text"]
    skipped, freed = server.metrics("kv_eviction_pages_skipped_total", "kv_eviction_pages_freed_total")
    assert (16 * skipped, 16 * freed) == (use["skipped_tokens"], use["freed_tokens"])


def test_streams_and_several_prompts_say_it_once(server: LiveServer) -> None:
    body = {"prompt": [PROMPT, PROMPT + " 7"], "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    whole: Any = server.complete(**body, kv_budget=32)
    lines = post(
        server, "/v1/completions", **body, kv_budget=32, stream=True, stream_options={"include_usage": True}
    ).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert events[-1]["usage"]["kv_eviction"] == whole["usage"]["kv_eviction"]
    assert whole["usage"]["kv_eviction"]["kv_budget"] == 32
    lines = post(server, "/v1/completions", **body, kv_budget=32, stream=True).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    marks = [event["kv_eviction"] for event in events if event["choices"][0]["finish_reason"]]
    assert {name: sum(mark[name] for mark in marks) for name in USE - {"kv_budget"}} == {
        name: whole["usage"]["kv_eviction"][name] for name in USE - {"kv_budget"}
    }
    assert sum("kv_eviction" in event for event in events) == len(marks) == 2


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"kv_budget": 31}, "kv_budget", "kv_budget is 31; it must be 0, or at least 32"),
        ({"kv_budget": -1}, "kv_budget", "kv_budget is -1"),
        ({"kv_budget": "many"}, "kv_budget", "kv_budget"),
        ({"kv_budget": 64, "n": 2}, "kv_budget", "n does not work with kv_budget 64"),
        ({"kv_budget": 64, "prompt_logprobs": 1}, "kv_budget", "prompt_logprobs does not work"),
        ({"kv_budget": 64, "use_beam_search": True, "n": 2}, "kv_budget", "with use_beam_search"),
        (
            {"kv_budget": 64, "prompt_cache_options": {"ttl": "30m"}},
            "kv_budget",
            "a pinned prompt (prompt_cache_options, cache_control) does not work",
        ),
    ],
)
def test_what_needs_all_pages_is_a_400(server: LiveServer, body: dict[str, Any], param: str, text: str) -> None:
    reply = post(server, "/v1/completions", prompt=PROMPT, max_tokens=4, **body)
    assert reply.status_code == 400
    assert text in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == param


@pytest.mark.nightly
def test_a_server_with_a_budget_marks_all_answers(tmp_path: Path) -> None:
    flags = ("--kv-eviction", "paged", "--kv-budget", "32", "--served-model-name", "tiny")
    messages = [{"role": "user", "content": PROMPT}]
    with serving(resolve("tiny").folder, tmp_path / "errors", *flags) as server:
        chat = post(server, "/v1/chat/completions", messages=messages, max_tokens=40).json()
        claude = post(server, "/v1/messages", model="tiny", messages=messages, max_tokens=40).json()
        response = post(server, "/v1/responses", model="tiny", input=PROMPT, max_output_tokens=40).json()
        for reply in (chat, claude, response):
            assert "usage" in reply, reply
            assert reply["usage"]["kv_eviction"]["kv_budget"] == 32, reply
        generated = post(server, "/generate", text=PROMPT, sampling_params={"max_new_tokens": 40}).json()
        assert generated["meta_info"]["kv_eviction"].keys() == USE
        exact = post(server, "/v1/chat/completions", messages=messages, max_tokens=40, kv_budget=0).json()
        assert "kv_eviction" not in exact["usage"]
        several = post(server, "/v1/chat/completions", messages=messages, max_tokens=4, n=2).json()
        assert "kv_eviction" not in several["usage"], "it needs all KV, and has it"
        own = post(server, "/v1/messages", model="tiny", messages=messages, max_tokens=40, kv_budget=64).json()
        assert own["usage"]["kv_eviction"]["kv_budget"] == 64
        own = post(server, "/v1/responses", model="tiny", input=PROMPT, max_output_tokens=40, kv_budget=0).json()
        assert "kv_eviction" not in own["usage"]
