"""Servers with a folder of their own beside what they share: what they say about both places, and restarts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from support.failed_start import failed_start_error
from support.live import LiveServer, serving, wait_for

pytestmark = pytest.mark.nightly
TIERS = ("--host-memory", "64MiB", "--load-policy", "always", "--max-total-tokens", "1024", "--max-num-seqs", "8")
PROMPT = "A farmer has 12 hens, and each of them lays 5 eggs a week. How many eggs does he get in a month? " * 3
Start = Callable[..., AbstractContextManager[LiveServer]]


@pytest.fixture(params=["shm", "file"])
def kind(request: pytest.FixtureRequest) -> str:
    """The store that servers share. Pages of shared memory are copied in place, which is preferred to the disk."""
    return str(request.param)


@pytest.fixture
def start(kind: str, sensitive: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Starts servers with folders of their own, which share memory or a folder."""
    (tmp_path / "memory").mkdir()
    url = {"shm": f"shm://kv?size=32MiB&folder={tmp_path}/memory", "file": f"file://{tmp_path}/shared"}[kind]

    def start_one(own: str, *flags: str) -> AbstractContextManager[LiveServer]:
        places = ("--cache-dir", str(tmp_path / own), "--cache-url", url)
        return serving(sensitive, tmp_path_factory.mktemp("s") / "errors", *TIERS, *places, *flags)

    return start_one


def ask(server: LiveServer) -> tuple[list[int], dict[str, Any]]:
    """Returns an answer's tokens, and where the prompt's cached tokens came from."""
    reply: Any = server.complete(prompt=PROMPT, max_tokens=8, temperature=0, ignore_eos=True, return_token_ids=True)
    return reply["choices"][0]["token_ids"], reply["usage"]["prompt_tokens_details"]["cached_tokens_details"]


def hits(server: LiveServer) -> list[float]:
    return list(server.metrics("disk_prefix_cache_hits_total", "store_prefix_cache_hits_total"))


def test_a_prompt_is_on_disk_and_in_the_shared_store(start: Start, kind: str) -> None:
    with start("first") as first:
        reply: Any = first.complete(prompt=PROMPT, max_tokens=0)
        stored = reply["usage"]["prompt_tokens_details"]["stored_tokens"]
        assert stored["host"] == stored["disk"] == stored["storage"] > 64
        answer, _ = ask(first)
    with start("second") as second:
        again, details = ask(second)
        assert again == answer
        assert (details["device"], details["host"]) == (0, 0)
        assert hits(second) == [0, details["storage"]]
        assert second.metric("store_fetch_seconds_total") > 0
        wait_for(
            lambda: second.metric("disk_pages_written_total") >= details["storage"] // 16, "nothing is written"
        )
        (state,) = second.http.get("/server_info").json()["internal_states"]
        assert state["shared_store"]["prefix_hits_total"] == details["storage"]
        assert state["disk"]["n_pages"] > 0
    with start("second") as second:
        explained = second.http.post("/cache/explain", json={"prompt": PROMPT}).json()
        n_tokens = explained["storage"]["tokens"]
        n_on_disk, n_shared = (0, n_tokens) if kind == "shm" else (n_tokens, 0)
        assert explained["storage"] == {
            "tokens": n_tokens,
            "is_fetched": True,
            "fetched_tokens": n_tokens,
            "shared_store_tokens": n_shared,
        }
        assert f"{n_on_disk} from disk and {n_shared} from the shared store" in explained["text"]
        again, details = ask(second)
        assert again == answer
        assert hits(second) == [n_on_disk, n_shared]
        reply = second.http.post("/cache/invalidate", json={"prompt": PROMPT})
        assert reply.status_code == 200, reply.text
        again, details = ask(second)
        assert again == answer
        assert details["storage"] <= 16


def test_a_folder_that_is_too_small_is_refused_as_without_a_shared_store(
    sensitive: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    places = ("--cache-dir", str(tmp_path / "own"), "--cache-url", f"file://{tmp_path}/shared")
    error = failed_start_error(
        tmp_path_factory.mktemp("s"), str(sensitive), *TIERS, *places, "--cache-dir-size", "1KiB"
    )
    assert "the cache folder may take 1024 bytes" in error
