from __future__ import annotations

import time

from radixkv.runtime.device.start_times import StartTimes


def test_each_stage_begins_where_the_one_before_ended() -> None:
    now = iter([10.0, 12.5, 13.0, 13.25])
    times = StartTimes(begun=8.0, clock=lambda: next(now))
    for stage in ("imports", "weights", "graphs", "weights"):
        times.end(stage)
    assert times.seconds == {"imports": 2.0, "weights": 2.75, "graphs": 0.5}
    assert str(times) == "5.2 s (weights 2.8, imports 2.0, graphs 0.5)"


def test_the_first_stage_of_a_process_began_with_it() -> None:
    times = StartTimes.of_process()
    times.end("imports")
    assert 0.0 < times.seconds["imports"] <= time.monotonic()
