"""A real server whose KV outlives it in a folder: restarts, kills while it writes, and folders that it refuses."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from support.failed_start import failed_start_error
from support.live import LIMIT_S, LiveServer, wait_for
from support.page_files import page_files

TIERS = ("--host-memory", "64MiB", "--load-policy", "always", "--max-total-tokens", "1024", "--max-num-seqs", "8")
STORY = "A farmer has 12 hens, and each of them lays 5 eggs a week. How many eggs does he get in a month? "
ANIMALS = ("hens", "ducks", "geese", "quails", "swans", "emus")
PROMPTS = [STORY.replace("hens", animal) * 3 for animal in ANIMALS]
Start = Callable[..., AbstractContextManager[LiveServer]]


def ask(server: LiveServer, prompt: str) -> tuple[list[int], int]:
    """Returns an answer's tokens, and how many of the prompt's were cached."""
    reply: Any = server.complete(prompt=prompt, max_tokens=8, temperature=0, ignore_eos=True, return_token_ids=True)
    return reply["choices"][0]["token_ids"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def stop(server: LiveServer) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=LIMIT_S) == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def flags(folder: Path) -> tuple[str, ...]:
    return (*TIERS, "--cache-dir", str(folder))


@pytest.mark.nightly
def test_a_prompt_is_cached_after_a_restart(start: Start, folder: Path, flags: tuple[str, ...]) -> None:
    with start(*flags) as server:
        answer, n_cached = ask(server, PROMPTS[0])
        assert n_cached == 0
        stop(server)
    assert page_files(folder)
    assert [path for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o077] == []
    with start(*flags) as server:
        explained = server.http.post("/cache/explain", json={"prompt": PROMPTS[0]}).json()
        assert explained["storage"] == {"tokens": explained["storage"]["tokens"], "is_fetched": True}
        assert explained["cached_tokens"] == 0
        assert "the store behind the host tier has" in explained["text"]
        again, n_cached = ask(server, PROMPTS[0])
        assert again == answer
        assert n_cached == explained["storage"]["tokens"] > 64
        n_hits, n_fetched = server.metrics("disk_prefix_cache_hits_total", "disk_pages_fetched_total")
        assert n_hits == 16 * n_fetched == n_cached
        server.http.post("/flush_cache")
        wait_for(lambda: page_files(folder) == [], "the folder is not empty")
        assert ask(server, PROMPTS[0]) == (answer, 0)


def ask_until_the_end(server: LiveServer) -> None:
    """Asks for prompts in turn until the server is gone."""
    with httpx.Client(base_url=server.base_url, timeout=LIMIT_S) as http:
        n = 0
        while True:
            try:
                body = {"prompt": f"{n} {PROMPTS[n % len(PROMPTS)]}", "max_tokens": 2}
                http.post("/v1/completions", json=body)
            except httpx.HTTPError:
                return
            n += 1


@pytest.mark.nightly
@pytest.mark.parametrize("n_kills", [1, 10])
def test_kills_while_pages_are_written(start: Start, folder: Path, flags: tuple[str, ...], n_kills: int) -> None:
    rng = random.Random(n_kills)
    answers: dict[str, list[int]] = {}
    n_cached = 0
    for _ in range(n_kills + 1):
        with start(*flags) as server:
            for prompt in PROMPTS:
                answer, n_cached = ask(server, prompt)
                assert answers.setdefault(prompt, answer) == answer
            asking = Thread(target=ask_until_the_end, args=(server,))
            asking.start()
            n_files = len(page_files(folder)) + rng.randrange(60)
            wait_for(lambda n=n_files: len(page_files(folder)) >= n, "nothing is written")
            os.kill(server.runtime_pid, signal.SIGKILL)
            os.kill(server.process.pid, signal.SIGKILL)
            asking.join(LIMIT_S)
    assert n_cached > 64, "the last server found nothing of those that were killed"


@pytest.mark.nightly
def test_a_second_server_in_the_same_folder_is_refused(
    start: Start, sensitive: Path, folder: Path, flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with start(*flags) as server:
        error = failed_start_error(tmp_path_factory.mktemp("2"), str(sensitive), *flags)
        assert f"another server uses the cache folder {folder}" in error
        ask(server, PROMPTS[0])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mode", "changes", "parts"),
    [
        (0o755, (), ["open to other users", "0700"]),
        (0o700, ("--cache-dir-size", "1KiB"), ["--cache-dir-size", "1024 bytes", "a page takes"]),
        (0o700, ("--cache-dir", "/proc/radixkv"), ["/proc/radixkv", "cannot be used"]),
        (0o700, ("--cache-dir", "/dev/null"), ["/dev/null", "cannot be used"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_cannot_be_used_is_one_line(
    sensitive: Path,
    folder: Path,
    flags: tuple[str, ...],
    tmp_path: Path,
    mode: int,
    changes: tuple[str, ...],
    parts: list[str],
) -> None:
    folder.mkdir()
    folder.chmod(mode)
    (tmp_path / "t").mkdir()
    error = failed_start_error(tmp_path / "t", str(sensitive), *flags, *changes)
    assert all(part in error for part in parts), error
