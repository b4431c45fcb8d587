"""Figures in the log: while there is work, once after it, and never in between."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import msgspec
import pytest

from radixkv.errors import RequestError, RuntimeDied
from radixkv.frontend.http.errors import RuntimeSilent
from radixkv.frontend.metrics.log import StatsLog, stage
from radixkv.frontend.metrics.stats_delta import Interval
from radixkv.wire import GetStats, Stats
from support.scripted_runtime import ScriptedLoop


def look(**changes: int) -> Stats:
    (stats,) = ScriptedLoop().receive(GetStats(id="g"))
    assert isinstance(stats, Stats)
    return msgspec.structs.replace(stats, **{"n_running": 0, "n_waiting": 0, **changes})


class Script:
    """Gives one look after the other; in the end the runtime is gone."""

    def __init__(self, looks: Sequence[Stats | RequestError]) -> None:
        self._looks = list(looks)

    async def stats(self) -> Stats:
        if not self._looks:
            raise RuntimeDied("gone")
        found = self._looks.pop(0)
        if isinstance(found, RequestError):
            raise found
        return found


def lines(looks: Sequence[Stats | RequestError]) -> tuple[list[str], list[Interval]]:
    written: list[str] = []
    seen: list[Interval] = []
    asyncio.run(StatsLog(Script(looks), 0.001, seen.append, write=written.append).run())
    return written, seen


def test_idle_is_silent() -> None:
    written, seen = lines([look()] * 5)
    assert written == []
    assert len(seen) == 4


def test_work_is_a_line_an_interval_and_one_after_it_ended() -> None:
    busy = [look(n_running=2, n_waiting=1, steps_total=10 + i) for i in range(3)]
    written, _ = lines([look(), *busy, look(steps_total=20), look(steps_total=20), look(steps_total=20)])
    assert [line.split(",")[0] for line in written] == ["2 running"] * 3 + ["0 running"]


def test_work_between_two_looks_is_not_missed() -> None:
    written, _ = lines([look(), look(steps_total=12), look(steps_total=12)])
    assert len(written) == 1


def test_who_only_waits_is_work_too() -> None:
    assert len(lines([look(n_waiting=1), look(n_waiting=1)])[0]) == 1
    assert len(lines([look(n_waiting=1), look(), look()])[0]) == 1


def test_a_line_says_what_happened_in_the_interval() -> None:
    after = look(
        n_running=3,
        n_waiting=4,
        steps_total=20,
        prefix_queries_total=140,
        prefix_hits_total=70,
        prompt_tokens_total=140,
        generation_tokens_total=90,
    )
    (line,), (interval,) = lines([look(), after])
    assert line.startswith("3 running, 4 waiting, pool 25.0% in use and 25.0% cached, 75.0% of prompt tokens were")
    assert interval.prompt_tokens_per_s * interval.seconds == pytest.approx(40)
    assert interval.generation_tokens_per_s * interval.seconds == pytest.approx(40)
    assert f"{interval.generation_tokens_per_s:.1f} generated tokens/s" in line


def test_without_prompts_there_is_no_hit_rate() -> None:
    (line,), _ = lines([look(), look(steps_total=10, generation_tokens_total=60)])
    assert "no prompts" in line


def test_a_runtime_in_a_long_step_is_asked_again() -> None:
    written, seen = lines([look(), RuntimeSilent("busy"), look(steps_total=10)])
    assert len(written) == len(seen) == 1


def test_a_stage_is_said_at_once_and_again_while_it_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    async def work(seconds: float) -> None:
        async with stage("building", reminder_s=0.02):
            await asyncio.sleep(seconds)
        await asyncio.sleep(0.05)

    asyncio.run(work(0.0))
    assert capsys.readouterr().err == "radixkv: building\n"
    asyncio.run(work(0.2))
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == "radixkv: building"
    assert re.fullmatch(r"radixkv: still building, for \d+ s", second)
