"""A real server with a small pool: the conversation whose session is closed is evicted first."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from support.live import LiveServer

STORY = "{} has 12 hens, and each of them lays 5 eggs a week. How many eggs does {} get in a month? " * 2


def ask(server: LiveServer, name: str) -> None:
    server.complete(prompt=STORY.format(name, name, name, name), max_tokens=4, temperature=0, session_id=name)


def explain(server: LiveServer, name: str) -> Any:
    prompt = STORY.format(name, name, name, name)
    return server.http.post("/cache/explain", json={"prompt": prompt}).json()


def test_a_closed_conversation_is_evicted_first(
    start: Callable[..., AbstractContextManager[LiveServer]],
) -> None:
    with start("--max-total-tokens", "512", "--max-num-batched-tokens", "256", "--max-num-seqs", "4") as server:
        ask(server, "Anna")
        n_cached = explain(server, "Anna")["cached_tokens"]
        assert n_cached > 32
        ask(server, "Berta")
        closed = server.http.post("/sessions/Berta/close").json()
        assert closed["pages_demoted"]["device"] > 0
        found = explain(server, "Berta")
        assert found["is_demoted"] is True
        assert found["cached_tokens"] > 32, "it is found until it is evicted"
        assert "is_demoted" not in explain(server, "Anna")
        names = iter("Clara Dora Emma Frieda Greta Hanna Ida Julia".split())
        while (n_left := explain(server, "Berta")["cached_tokens"]) >= n_cached:
            ask(server, next(names))
        assert explain(server, "Anna")["cached_tokens"] > n_left
