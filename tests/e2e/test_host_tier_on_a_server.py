"""A real server with a small pool and a host tier: what its clients see of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.live import LIMIT_S, LiveServer, serving, wait_for

SMALL = ("--max-total-tokens", "512", "--max-num-batched-tokens", "256", "--max-num-seqs", "8")
STORY = "A farmer has 12 hens, and each of them lays 5 eggs a week. How many eggs does he get in a month? " * 3


@pytest.fixture
def tiered(sensitive: Path, tmp_path: Path) -> Iterator[LiveServer]:
    flags = ("--host-memory", "64MiB", "--load-policy", "always", "--request-log", str(tmp_path / "lines"), *SMALL)
    with serving(sensitive, tmp_path / "errors", *flags) as live:
        yield live


def ask(server: LiveServer, prompt: str) -> tuple[list[int], dict[str, Any]]:
    """Returns an answer's tokens, and the usage without the counts that every server has."""
    reply: Any = server.complete(prompt=prompt, max_tokens=8, temperature=0, ignore_eos=True, return_token_ids=True)
    return reply["choices"][0]["token_ids"], reply["usage"]["prompt_tokens_details"]


def evict_story(server: LiveServer) -> None:
    """Fills the pool with other prompts, once what the server has computed is in the host tier."""
    wait_for(lambda: server.metric("host_pages_stored_total") > 0, "nothing was stored")
    for animal in ("goats", "ducks", "geese", "cows", "sheep", "pigs"):
        ask(server, STORY.replace("A farmer", f"The {animal} of a farmer").replace("hens", animal))


@pytest.mark.nightly
def test_an_evicted_prompt_comes_from_the_host_tier(tiered: LiveServer, tmp_path: Path) -> None:
    answer, usage = ask(tiered, STORY)
    assert usage == {"cached_tokens": 0, "cached_tokens_details": {"device": 0, "host": 0}}
    evict_story(tiered)

    explained = tiered.http.post("/cache/explain", json={"prompt": STORY}).json()
    assert explained["host"]["is_loaded"] is True
    assert "in the host tier" in explained["text"]
    command = [sys.executable, "-m", "radixkv.cli", "explain", STORY, "--base-url", tiered.base_url]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert shown.stdout.startswith(explained["text"])

    (matched,) = tiered.http.post("/cache/match", json={"prompt": STORY}).json()["prompts"]
    again, usage = ask(tiered, STORY)
    assert again == answer
    assert usage["cached_tokens"] == explained["cached_tokens"] > 64
    assert usage["cached_tokens_details"] == matched["matched_tokens"]
    assert usage["cached_tokens_details"]["host"] == explained["host"]["tokens"] > 0
    n_hits, n_loaded_pages, n_loading = tiered.metrics(
        "host_prefix_cache_hits_total", "host_pages_loaded_total", "num_requests_loading"
    )
    assert n_hits == 16 * n_loaded_pages == explained["host"]["tokens"]
    assert n_loading == 0
    assert tiered.metric("load_seconds_per_token") > 0
    (state,) = tiered.http.get("/server_info").json()["internal_states"]
    assert state["host"]["prefix_hits_total"] == n_hits

    lines = [msgspec.json.decode(line) for line in (tmp_path / "lines").read_bytes().splitlines()]
    assert lines[0]["load_s"] is None
    assert 0 < lines[-1]["load_s"] <= lines[-1]["queue_s"]

    tiered.http.post("/flush_cache")
    wait_for(lambda: tiered.metric("host_slots_free") == tiered.metric("host_slots"), "the host tier is not empty")
    assert "host" not in tiered.http.post("/cache/explain", json={"prompt": STORY}).json()
    assert ask(tiered, STORY) == (answer, {"cached_tokens": 0, "cached_tokens_details": {"device": 0, "host": 0}})


@pytest.mark.nightly
def test_a_policy_of_never_computes_and_says_so(start: Callable[..., AbstractContextManager[LiveServer]]) -> None:
    with start("--host-memory", "64MiB", "--load-policy", "never", *SMALL) as server:
        answer, _ = ask(server, STORY)
        evict_story(server)
        explained = server.http.post("/cache/explain", json={"prompt": STORY}).json()
        assert explained["host"]["is_loaded"] is False
        assert explained["host"]["tokens"] > 0
        assert "never" in explained["text"]
        again, usage = ask(server, STORY)
        assert again == answer
        assert usage["cached_tokens"] == explained["cached_tokens"]
        assert usage["cached_tokens_details"]["host"] == 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("size", "parts"),
    [
        ("100TiB", ["a host tier of 109951162777600 bytes", "set --host-memory lower"]),
        ("10", ["a host tier of 10 bytes is less than one page", "--host-memory"]),
    ],
)
def test_a_size_that_does_not_fit_ends_the_start_with_one_line(
    sensitive: Path, size: str, parts: list[str]
) -> None:
    command = [sys.executable, "-m", "radixkv.cli", "serve", str(sensitive), "--port", "0", "--host-memory", size]
    command += ["--grammar-backend", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert all(part in last for part in parts), done.stderr
    assert "Traceback" not in done.stderr
