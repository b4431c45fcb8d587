"""Statistics in the log: each interval with work is a line, idle intervals are not."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from radixkv.errors import RequestError, RuntimeDied
from radixkv.frontend.http.errors import RuntimeSilent
from radixkv.frontend.metrics.log import log_line, log_statistics
from radixkv.frontend.metrics.stats_delta import StatsDelta
from radixkv.wire.cache_use import CacheUse
from radixkv.wire.messages import GetStats
from radixkv.wire.stats import Stats
from support.scripted_runtime import DISK, HOST, SHARED_STORE, ScriptedLoop


def counters(**changes: Any) -> Stats:
    (stats,) = ScriptedLoop().receive(GetStats(id="g"))
    assert isinstance(stats, Stats)
    return msgspec.structs.replace(stats, **{"n_running": 0, "n_waiting": 0, **changes})


class Script:
    """Returns or raises the readings in turn, then sets ``is_over``. ``RESTART`` is a new runtime."""

    def __init__(self, readings: Sequence[Stats | RequestError]) -> None:
        self._looks = list(readings)
        self.is_over = asyncio.Event()
        self.n_restarts = 0

    async def stats(self) -> Stats:
        if not self._looks:
            self.is_over.set()
            await asyncio.Event().wait()
        reading = self._looks.pop(0)
        if reading is RESTART:
            self.n_restarts += 1
            return await self.stats()
        if isinstance(reading, RequestError):
            raise reading
        return reading


RESTART = RequestError("another runtime answers from here on")


def lines(readings: Sequence[Stats | RequestError]) -> tuple[list[str], list[StatsDelta]]:
    written: list[str] = []
    deltas: list[StatsDelta | None] = []

    async def log() -> None:
        script = Script(readings)
        logging = asyncio.create_task(log_statistics(script, 0.001, deltas.append, write=written.append))
        await script.is_over.wait()
        logging.cancel()
        await asyncio.gather(logging, return_exceptions=True)

    asyncio.run(log())
    assert deltas.count(None) == readings.count(RESTART)
    return written, [delta for delta in deltas if delta is not None]


def test_idle_is_silent() -> None:
    written, deltas = lines([counters()] * 5)
    assert written == []
    assert len(deltas) == 4


def test_each_interval_with_work_is_one_line() -> None:
    busy = [counters(n_running=2, n_waiting=1, steps_total=10 + i) for i in range(3)]
    written, _ = lines(
        [counters(), *busy, counters(steps_total=20), counters(steps_total=20), counters(steps_total=20)]
    )
    assert [line.split(",")[0] for line in written] == ["2 running"] * 3 + ["0 running"]


def test_work_between_two_readings_is_logged() -> None:
    written, _ = lines([counters(), counters(steps_total=12), counters(steps_total=12)])
    assert len(written) == 1


def test_waiting_requests_count_as_work() -> None:
    assert len(lines([counters(n_waiting=1), counters(n_waiting=1)])[0]) == 1
    assert len(lines([counters(n_waiting=1), counters(), counters()])[0]) == 1


def test_a_line_has_the_statistics_of_its_interval() -> None:
    after = counters(
        n_running=3,
        n_waiting=4,
        steps_total=20,
        prefix_queries_total=140,
        cache_use=CacheUse(70),
        prompt_tokens_total=140,
        generation_tokens_total=90,
    )
    (line,), (interval,) = lines([counters(), after])
    assert line.startswith("3 running, 4 waiting, pool 25.0% in use and 25.0% cached, 75.0% of prompt tokens were")
    assert interval.prompt_tokens_per_s * interval.seconds == pytest.approx(40)
    assert interval.generation_tokens_per_s * interval.seconds == pytest.approx(40)
    assert f"{interval.generation_tokens_per_s:.1f} generated tokens/s" in line


def test_a_line_says_how_running_requests_use_their_slots() -> None:
    use = {"n_running_slots": 400, "n_running_tokens": 380, "n_duplicate_tokens": 19, "n_saved_tokens": 2048}
    (line,), _ = lines([counters(), counters(steps_total=10, n_running=3, **use)])
    assert "95.0% of slots filled, 5.0% copies, 2048 tokens saved" in line
    (line,), _ = lines([counters(), counters(steps_total=10)])
    assert "copies" not in line


def test_a_line_says_what_the_host_tier_gave() -> None:
    later = msgspec.structs.replace(HOST, n_slots_free=100, pages_loaded_total=HOST.pages_loaded_total + 12)
    (line,), _ = lines([counters(host=HOST), counters(steps_total=10, host=later)])
    assert "host tier 50.0% used, 12 pages loaded" in line
    (line,), _ = lines([counters(), counters(steps_total=10)])
    assert "host tier" not in line


def test_a_line_says_what_the_disk_tier_did() -> None:
    later = msgspec.structs.replace(
        DISK,
        n_bytes=3 << 29,
        pages_fetched_total=DISK.pages_fetched_total + 7,
        pages_written_total=DISK.pages_written_total + 9,
    )
    (line,), _ = lines([counters(host=HOST, disk=DISK), counters(steps_total=10, host=HOST, disk=later)])
    assert "disk tier 1.5 GiB, 7 pages fetched and 9 written" in line
    stats = [counters(steps_total=n, host=HOST, disk=DISK, shared_store=SHARED_STORE) for n in (0, 10)]
    (line,), _ = lines(stats)
    assert "disk tier 0.0 GiB, 0 pages fetched and 0 written, shared store away, 0 pages fetched and 0" in line
    (line,), _ = lines([counters(host=HOST), counters(steps_total=10, host=HOST)])
    assert "disk tier" not in line


def test_without_prompts_there_is_no_hit_rate() -> None:
    (line,), _ = lines([counters(), counters(steps_total=10, generation_tokens_total=60)])
    assert "no prompts" in line


def test_a_runtime_in_a_long_step_is_queried_again() -> None:
    written, deltas = lines([counters(), RuntimeSilent("busy"), counters(steps_total=10)])
    assert len(written) == len(deltas) == 1


def test_counters_of_two_runtimes_are_not_compared() -> None:
    """Whether the log asked while there was none, or never noticed that."""
    old, new = counters(steps_total=100), counters(steps_total=3)
    for between in ([RESTART], [RuntimeDied("gone"), RuntimeDied("gone"), RESTART]):
        written, deltas = lines([old, *between, new, msgspec.structs.replace(new, steps_total=8)])
        assert len(written) == 1
        assert [(delta.before.steps_total, delta.after.steps_total) for delta in deltas] == [(3, 8)]


def test_a_line_that_cannot_be_written_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk under the log must not end what the line is about."""
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(full, line_buffering=True, write_through=True))
        log_line("the runtime is started again")
