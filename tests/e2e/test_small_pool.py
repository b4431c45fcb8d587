"""What the small pool of a real server keeps and evicts: pins stay, and a closed conversation goes first."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from support.live import LIMIT_S, LiveServer, serving

pytestmark = pytest.mark.nightly

SMALL = ("--max-total-tokens", "512", "--max-num-batched-tokens", "256", "--max-num-seqs", "8")
RULES = "You are a patient teacher of mathematics who answers in short steps, and writes the result on a line."
STORY = "A farmer has 12 hens, and each of them lays 5 eggs a week. How many eggs does he get in a month? " * 3
CONVERSATION = "{} has 12 hens, and each of them lays 5 eggs a week. How many eggs does {} get in a month? " * 2

Start = Callable[..., AbstractContextManager[LiveServer]]


@pytest.fixture(scope="module")
def small_server(sensitive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(sensitive, tmp_path_factory.mktemp("s") / "errors", *SMALL) as live:
        yield live


@pytest.fixture
def server(small_server: LiveServer) -> LiveServer:
    small_server.flush_cache()
    return small_server


def fill(server: LiveServer) -> None:
    """Fills the pool with other prompts."""
    for animal in ("goats", "ducks", "geese", "cows", "sheep", "pigs"):
        server.complete(prompt=STORY.replace("hens", animal).replace("A farmer", animal), max_tokens=2)


def explain(server: LiveServer, **body: Any) -> Any:
    return server.http.post("/cache/explain", json=body).json()


def test_a_pinned_prompt_stays_and_explain_says_so(server: LiveServer) -> None:
    server.complete(prompt=RULES, max_tokens=2)
    pinned = server.http.post("/cache/pin", json={"prompt": RULES, "ttl": "10m"}).json()
    assert 16 <= pinned["pinned_tokens"] <= pinned["prompt_tokens"]
    assert 590 < pinned["seconds_left"] <= 600
    assert 16 * server.metric("kv_pages_pinned") == pinned["pinned_tokens"]
    fill(server)
    found = explain(server, prompt=RULES)
    assert found["pinned"]["tokens"] == pinned["pinned_tokens"] <= found["cached_tokens"] + 1
    command = [sys.executable, "-m", "radixkv.cli", "explain", RULES, "--base-url", server.base_url]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert f"{pinned['pinned_tokens']} are pinned for" in shown.stdout

    server.http.post("/cache/pin", json={"prompt": RULES, "ttl": "0s"})
    assert "pinned" not in explain(server, prompt=RULES)
    fill(server)
    assert explain(server, prompt=RULES)["cached_tokens"] == 0


def test_a_breakpoint_keeps_the_system_prompt_of_a_chat(server: LiveServer) -> None:
    marked = {"type": "text", "text": RULES, "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "1h"}}
    messages = [{"role": "system", "content": [marked]}, {"role": "user", "content": "How many legs have 12 hens?"}]
    body = {"messages": messages, "max_tokens": 2}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200
    found = explain(server, messages=messages)
    assert 0 < found["pinned"]["tokens"] < found["cached_tokens"]
    fill(server)
    assert explain(server, messages=messages)["cached_tokens"] == found["pinned"]["tokens"]


def test_a_closed_conversation_is_evicted_first(server: LiveServer) -> None:
    def prompt(name: str) -> str:
        return CONVERSATION.format(name, name, name, name)

    def ask(name: str) -> None:
        server.complete(prompt=prompt(name), max_tokens=4, temperature=0, session_id=name)

    ask("Anna")
    n_cached = explain(server, prompt=prompt("Anna"))["cached_tokens"]
    assert n_cached > 32
    ask("Berta")
    closed = server.http.post("/sessions/Berta/close").json()
    assert closed["pages_demoted"]["device"] > 0
    found = explain(server, prompt=prompt("Berta"))
    assert found["is_demoted"] is True
    assert found["cached_tokens"] > 32, "it is found until it is evicted"
    assert "is_demoted" not in explain(server, prompt=prompt("Anna"))
    names = iter("Clara Dora Emma Frieda Greta Hanna Ida Julia".split())
    while (n_left := explain(server, prompt=prompt("Berta"))["cached_tokens"]) >= n_cached:
        ask(next(names))
    assert explain(server, prompt=prompt("Anna"))["cached_tokens"] > n_left


@pytest.mark.nightly
def test_a_budget_of_0_refuses_pins(start: Start) -> None:
    with start(*SMALL, "--pin-budget", "0") as server:
        for path, body in (
            ("/cache/pin", {"prompt": RULES}),
            ("/v1/completions", {"prompt": RULES, "max_tokens": 1, "prompt_cache_options": {}}),
        ):
            reply = server.http.post(path, json=body)
            assert reply.status_code == 400, reply.text
            assert "--pin-budget" in reply.json()["error"]["message"]
        server.complete(prompt=RULES, max_tokens=1, prompt_cache_options={"mode": "explicit"})
