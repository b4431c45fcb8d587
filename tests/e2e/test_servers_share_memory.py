"""Servers that share memory: what each finds of the others, kills, ranks, replicas and starts that fail."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import httpx
import pytest

from radixkv.runtime.tiers.stores.shared_memory.segment import Segment
from support.failed_start import failed_start_error
from support.live import LIMIT_S, LiveServer, serving, wait_for

TIERS = ("--host-memory", "64MiB", "--load-policy", "always", "--max-total-tokens", "1024", "--max-num-seqs", "8")
STORY = "A farmer has 12 hens, and each of them lays 5 eggs a week. How many eggs does he get in a month? "
COLD = {"device": 0, "host": 0, "storage": 0}
Start = Callable[..., AbstractContextManager[LiveServer]]


@pytest.fixture
def url(tmp_path: Path) -> str:
    (tmp_path / "memory").mkdir()
    return f"shm://kv?size=32MiB&folder={tmp_path}/memory"


@pytest.fixture
def start(sensitive: Path, tmp_path_factory: pytest.TempPathFactory, url: str) -> Start:
    """Starts servers, each with a folder of its own for ``errors``."""

    def start_one(*flags: str, model: Path = sensitive) -> AbstractContextManager[LiveServer]:
        return serving(model, tmp_path_factory.mktemp("s") / "errors", *TIERS, "--cache-url", url, *flags)

    return start_one


def prompt(number: int) -> str:
    return f"{number} farmers. " + STORY * 3


def ask(server: LiveServer, text: str, **body: object) -> tuple[list[int], dict[str, Any]]:
    """Returns an answer's tokens, and where the prompt's cached tokens came from."""
    reply: Any = server.complete(
        **{"prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **body}
    )
    return reply["choices"][0]["token_ids"], reply["usage"]["prompt_tokens_details"]["cached_tokens_details"]


def compute(server: LiveServer, text: str) -> int:
    """Computes a prompt for others; returns how many of its tokens are in memory that servers share."""
    reply: Any = server.complete(prompt=text, max_tokens=0)
    return reply["usage"]["prompt_tokens_details"]["stored_tokens"]["storage"]


@pytest.mark.nightly
def test_a_second_server_finds_the_prefixes_of_the_first(start: Start) -> None:
    with start() as first, start() as second:
        answers = [ask(first, prompt(n)) for n in range(3)]
        assert [details for _, details in answers] == [COLD] * 3
        assert compute(first, prompt(3)) > 64
        n_written, n_stored = 0.0, 1.0

        def is_written() -> bool:
            nonlocal n_written, n_stored
            n_written, n_stored = first.metrics("store_pages_written_total", "host_pages_stored_total")
            return n_written == n_stored

        wait_for(is_written, "pages are not written")
        for n, (answer, _) in enumerate(answers):
            (matched,) = second.http.post("/cache/match", json={"prompt": prompt(n)}).json()["prompts"]
            again, details = ask(second, prompt(n))
            assert again == answer
            assert details["storage"] > 64
            assert details["device"] == details["host"] == 0
            assert 0 <= matched["matched_tokens"]["storage"] - details["storage"] <= 16
        names = ("store_pages_fetched_total", "store_pages_missed_total", "store_is_away", "store_lookups_total")
        n_fetched, *others = second.metrics(*names)
        assert (n_fetched > 12, others) == (True, [0, 0, 0])
        # a salt isolates, and what is removed is gone for both
        assert ask(second, prompt(3), cache_salt="s")[1] == COLD
        reply = first.http.post("/cache/invalidate", json={"prompt": prompt(3)})
        assert reply.status_code == 200, reply.text
        assert ask(second, prompt(3))[1]["storage"] <= 16
    with start() as third:
        assert ask(third, prompt(0))[0] == answers[0][0]
        assert third.metric("store_pages_fetched_total") > 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--tensor-parallel-size", "2"), marks=pytest.mark.nightly),
        pytest.param(("--device", "cpu", "--data-parallel-size", "2"), marks=pytest.mark.nightly),
    ],
)
def test_ranks_and_replicas(start: Start, flags: tuple[str, ...]) -> None:
    with start(*flags) as first, start(*flags) as second:
        for n in range(4):
            assert compute(first, prompt(n)) > 64
        for n in range(4):
            answer, details = ask(second, prompt(n))
            assert details["storage"] > 64
            assert answer == ask(first, prompt(n))[0]
        assert second.metric("host_copies_failed_total") == 0


@pytest.mark.nightly
@pytest.mark.parametrize("n_kills", [1, 10])
def test_servers_that_are_killed(start: Start, n_kills: int) -> None:
    """At random moments while they store and fetch; another one goes on, and each answer is right."""
    random, wrong = Random(n_kills), list[int]()
    with start() as alone:
        expected = {n: ask(alone, prompt(n))[0] for n in range(12)}
    with start() as survivor:
        for _ in range(n_kills):
            with start() as victim:
                threads = [
                    Thread(target=_ask_until_it_dies, args=(victim, expected, wrong, seed)) for seed in range(3)
                ]
                for thread in threads:
                    thread.start()
                end = time.monotonic() + 0.2 + random.random()
                while time.monotonic() < end:
                    n = random.randrange(12)
                    assert ask(survivor, prompt(n))[0] == expected[n]
                os.kill(victim.runtime_pid, signal.SIGKILL)
                victim.process.kill()
                for thread in threads:
                    thread.join(LIMIT_S)
                assert not wrong
        survivor.flush_cache()
        n_fetched = survivor.metric("store_pages_fetched_total")
        for n, answer in expected.items():
            assert ask(survivor, prompt(n))[0] == answer
        n_after, n_missed = survivor.metrics("store_pages_fetched_total", "store_pages_missed_total")
        assert n_after > n_fetched
        assert "its checksum is wrong" not in (survivor.folder / "errors").read_text()
        assert n_missed <= n_after


def _ask_until_it_dies(server: LiveServer, expected: dict[int, list[int]], wrong: list[int], seed: int) -> None:
    random = Random(seed)
    with suppress(httpx.HTTPError, AssertionError):
        while True:
            n = random.randrange(len(expected))
            if ask(server, prompt(n))[0] != expected[n]:
                wrong.append(n)


@pytest.mark.nightly
def test_starts_that_fail(tmp_path: Path, url: str) -> None:
    """With one line, before or after the model is loaded; what is there stays as it is."""
    (folder := tmp_path / "start").mkdir()
    with ExitStack() as stack:
        segment = Segment(url)
        stack.callback(segment.close)
        segment.map(4096, 64)
        text = failed_start_error(folder, *TIERS, "--cache-url", url)
        assert "it has pages of 4096 bytes and 16 tokens, and those of this model have" in text
        text = failed_start_error(folder, *TIERS, "--cache-url", url.replace("32MiB", "64MiB"))
        assert "was made with 33554432 bytes, not 67108864" in text
        huge = url.replace("32MiB", "500TiB").replace("//kv", "//other")
        assert "does not fit into memory" in failed_start_error(folder, *TIERS, "--cache-url", huge)
    assert [file.name for file in (tmp_path / "memory").iterdir()] == [f"radixkv-{os.getuid()}-kv"]
