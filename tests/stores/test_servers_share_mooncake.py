"""Two servers that share a Mooncake Store over TCP: what each finds of the other, and what faults cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stores.conftest import Start
from stores.store_processes import PROMPTS, Mooncake, ask, free_port, running_mooncake, wait_until_written
from support.failed_start import failed_start_error
from support.live import LiveServer, wait_for

COLD = {"device": 0, "host": 0, "storage": 0}


def errors(server: LiveServer) -> str:
    return (server.folder / "errors").read_text()


@pytest.fixture
def mooncake(tmp_path: Path) -> Iterator[Mooncake]:
    (tmp_path / "mooncake").mkdir()
    with running_mooncake(tmp_path / "mooncake") as store:
        yield store


def test_a_second_server_finds_the_prefixes_in_mooncake(mooncake: Mooncake, start: Start) -> None:
    with start(url=mooncake.url) as first, start(url=mooncake.url) as second:
        answers = [ask(first, prompt)[0] for prompt in PROMPTS[:3]]
        wait_until_written(first)
        for answer, prompt in zip(answers, PROMPTS, strict=False):
            again, details = ask(second, prompt)
            assert again == answer
            assert details["storage"] > 64
        n_hits, n_fetched, n_missed = second.metrics(
            "store_prefix_cache_hits_total", "store_pages_fetched_total", "store_pages_missed_total"
        )
        assert n_hits == 16 * n_fetched > 0
        assert n_missed == 0
        dropped = first.http.post("/cache/invalidate", json={"prompt": PROMPTS[0]}).json()
        assert dropped["pages_dropped"]["storage"] > 0
        assert ask(first, PROMPTS[0]) == (answers[0], COLD)


def test_mooncake_goes_away_and_is_used_again(mooncake: Mooncake, start: Start) -> None:
    with start(url=mooncake.url) as first, start(url=mooncake.url) as second:
        answers = [ask(first, prompt)[0] for prompt in PROMPTS[:4]]
        wait_until_written(first)
        assert ask(second, PROMPTS[0])[1]["storage"] > 64
        mooncake.kill()
        started = time.monotonic()
        for answer, prompt in zip(answers[1:], PROMPTS[1:], strict=False):
            assert ask(second, prompt) == (answer, COLD)
        assert time.monotonic() - started < 5
        n_failures, is_away = second.metrics("store_failures_total", "store_is_away")
        assert (n_failures >= 1, is_away) == (True, 1)
        assert errors(second).count("is away") == 1

        mooncake.master.start()
        mooncake.add_memory()

        def is_used(server: LiveServer) -> bool:
            ask(server, f"{str(time.time_ns())[::-1]} {PROMPTS[0]}")
            time.sleep(0.5)
            return server.metric("store_is_away") == 0

        wait_for(lambda: is_used(first) and is_used(second), "it stays away")
        n_written = first.metric("store_pages_written_total")
        answer, _ = ask(first, PROMPTS[5])
        wait_for(lambda: first.metric("store_pages_written_total") > n_written, "nothing is written")
        wait_for(lambda: ask(second, PROMPTS[5])[1]["device"] > 0 or second.metric("store_is_away") == 0, "away")
        assert ask(second, PROMPTS[5])[0] == answer
        assert second.metric("store_prefix_cache_hits_total") > 0


def test_a_master_that_hangs_delays_one_request(mooncake: Mooncake, start: Start) -> None:
    with start(url=mooncake.url) as first, start(url=mooncake.url) as second:
        answers = [ask(first, prompt)[0] for prompt in PROMPTS[:3]]
        wait_until_written(first)
        mooncake.master.stop()
        waits = []
        for answer, prompt in zip(answers, PROMPTS, strict=False):
            started = time.monotonic()
            assert ask(second, prompt) == (answer, COLD)
            waits.append(time.monotonic() - started)
        assert 1 <= waits[0] < 5
        assert max(waits[1:]) < waits[0]
        second.process.terminate()
        assert second.process.wait(timeout=20) == 0  # no call that hangs keeps it
        mooncake.master.go_on()


def test_mooncake_without_memory_takes_no_pages(tmp_path: Path, start: Start) -> None:
    with running_mooncake(tmp_path, n_megabytes=0) as mooncake, start(url=mooncake.url) as server:
        answers = [ask(server, prompt)[0] for prompt in PROMPTS]
        wait_for(lambda: "is full" in errors(server), "nothing is said")
        assert [ask(server, prompt)[0] for prompt in PROMPTS] == answers
        assert server.metric("store_is_away") == 0


def test_a_start_without_a_master(tmp_path: Path) -> None:
    (folder := tmp_path / "t").mkdir()
    url = f"mooncake://127.0.0.1:{free_port()}"
    text = failed_start_error(folder, "--host-memory", "64MiB", "--cache-url", url)
    assert "no Mooncake master answers" in text


def test_a_start_whose_master_hangs(mooncake: Mooncake, tmp_path: Path) -> None:
    (folder := tmp_path / "t").mkdir()
    mooncake.master.stop()
    try:
        text = failed_start_error(folder, "--host-memory", "64MiB", "--cache-url", mooncake.url)
    finally:
        mooncake.master.go_on()
    assert f"master at 127.0.0.1:{mooncake.port} accepts connections and does not answer" in text
