"""What is learnt of the times between turns."""

from __future__ import annotations

import math
import random
from itertools import count

import pytest

from radixkv.runtime.pauses import pause_times
from radixkv.runtime.pauses.pause_times import PauseTimes

TOOL = "", ("search",)
OTHER = "", ("test",)


def learnt(*pauses: float, kind: tuple[str, tuple[str, ...]] = TOOL, times: PauseTimes | None = None) -> PauseTimes:
    times = times or PauseTimes()
    for pause_s in pauses:
        times.add(kind, pause_s, has_returned=True)
    return times


def test_a_fast_tool_is_worth_more_than_a_slow_one() -> None:
    times = learnt(*[0.5] * 8)
    learnt(*[30.0] * 8, kind=OTHER, times=times)
    assert times.rate(TOOL, 0.0) > 10 * times.rate(OTHER, 0.0) > 0.0
    assert times.rate(TOOL, 0.0) == pytest.approx(2.0, rel=0.5)


def test_nothing_is_known_of_other_tools_and_tenants() -> None:
    times = learnt(1.0)
    assert times.rate(OTHER, 0.0) == times.rate(("tenant", ("search",)), 0.0) == 0.0


def test_a_pause_that_takes_longer_than_any_is_worth_nothing() -> None:
    times = learnt(*[1.0] * 8)
    assert times.rate(TOOL, 0.5) > 0.0
    assert times.rate(TOOL, 4.0) == 0.0


def test_a_slow_tool_becomes_worth_more_as_its_end_comes_near() -> None:
    rng = random.Random(1)
    times = learnt(*(rng.uniform(25, 35) for _ in range(32)))
    assert times.rate(TOOL, 0.0) < times.rate(TOOL, 20.0)


SPREADS = [(1.0, 1.5, -1), (30.0, 0.1, 1)]


@pytest.mark.parametrize(("median_s", "sigma", "sign"), SPREADS, ids=["wide", "narrow"])
def test_ages_that_are_hardly_apart_are_worth_more_or_less(median_s: float, sigma: float, sign: int) -> None:
    """Where times vary widely, a pause is worth less the longer it lasts; just before a known time, more."""
    rng = random.Random(1)
    times = learnt(*(rng.lognormvariate(math.log(median_s), sigma) for _ in range(200)))
    rates = [times.rate(TOOL, age_s) for age_s in (12.0, 12.5, 13.0, 15.0, 15.5)]
    assert len(set(rates)) == len(rates)
    assert rates == sorted(rates, reverse=sign < 0)


def test_calls_that_never_return_make_a_tool_worth_less() -> None:
    times, often_lost = learnt(*[1.0] * 8), learnt(*[1.0] * 8)
    for _ in range(8):
        often_lost.add(TOOL, 3.0, has_returned=False)
    assert 0.0 < often_lost.rate(TOOL, 0.0) < times.rate(TOOL, 0.0)


def test_what_was_learnt_is_replaced_when_times_change() -> None:
    times = learnt(*[0.5] * 200)
    learnt(*[30.0] * 100, times=times)
    assert times.rate(TOOL, 0.0) < 0.2


@pytest.mark.parametrize("n_pauses", [1, 2, 9, 10, 11, 64, 200])
def test_quantiles_are_those_of_the_latest_that_came_back(n_pauses: int) -> None:
    rng = random.Random(1)
    times = PauseTimes()
    pauses = [3.0 * rng.lognormvariate(0, 0.8) for _ in range(n_pauses)]
    for pause_s in pauses:
        learnt(pause_s, times=times)
        times.add(TOOL, 100.0, has_returned=False)
    kind, latest = times.stats({})["\0search"], pauses[-64:]
    for found, share in ((kind.median_s, 0.5), (kind.p90_s, 0.9)):
        assert found is not None
        assert found in latest
        assert sum(one <= found for one in latest) >= share * len(latest) > sum(one < found for one in latest)


def test_the_kinds_with_the_most_pauses_are_shown() -> None:
    rng, times = random.Random(1), PauseTimes()
    kinds = [("", (f"tool {number}",)) for number in range(60)]
    n_ended = {kind: rng.randrange(6) for kind in kinds}
    n_open = {kind: rng.randrange(1, 6) for kind in kinds[30:]}
    for kind, n_times in n_ended.items():
        for number in range(n_times):
            times.add(kind, 1.0, has_returned=number % 2 == 0)
    counts = sorted((n_ended[kind] + n_open.get(kind, 0) for kind in kinds), reverse=True)
    shown = times.stats(n_open).values()
    assert [one.n_open + one.returns_total + one.given_up_total for one in shown] == counts[:16]


def test_patience_is_a_multiple_of_the_longest_pause() -> None:
    times = PauseTimes()
    assert times.patience_s(TOOL) == 600.0
    learnt(2.0, 0.1, times=times)
    assert times.patience_s(TOOL) == pytest.approx(6.0, rel=0.01)
    times.add(TOOL, 100.0, has_returned=False)
    assert times.patience_s(TOOL) == pytest.approx(6.0, rel=0.01), "one that never ended does not count"


def test_kinds_seen_least_recently_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pause_times, "MAX_KINDS", 3)
    times = PauseTimes()
    for number in range(3):
        learnt(1.0, kind=("", (f"tool {number}",)), times=times)
    learnt(1.0, kind=("", ("tool 0",)), times=times)
    learnt(1.0, kind=("", ("tool 3",)), times=times)
    known = [number for number in range(4) if times.rate(("", (f"tool {number}",)), 0.0)]
    assert known == [0, 2, 3]


@pytest.mark.parametrize("seed", range(3))
def test_waiting_for_the_highest_rate_first_returns_soonest(seed: int) -> None:
    """Of many pauses, some of which go on in each second of room, serving by rate loses fewer than by age."""
    rng = random.Random(seed)
    medians = {("", (f"tool {n}",)): 2.0**n for n in range(6)}
    times = PauseTimes()
    for kind, median in medians.items():
        learnt(*(median * rng.lognormvariate(0, 0.5) for _ in range(64)), kind=kind, times=times)
    hits = {"rate": 0, "age": 0}
    for policy in hits:
        clock, serials, kept = 0.0, count(), dict[int, tuple[tuple[str, tuple[str, ...]], float, float]]()
        draws = random.Random(seed)
        for _ in range(3000):
            clock += 0.25
            for serial, (_, _, due) in list(kept.items()):
                if due <= clock:
                    del kept[serial]
                    hits[policy] += 1
            kind = draws.choice(list(medians))
            kept[next(serials)] = kind, clock, clock + medians[kind] * draws.lognormvariate(0, 0.5)
            if len(kept) > 12:
                worths = {
                    serial: times.rate(kind, clock - begun) if policy == "rate" else begun
                    for serial, (kind, begun, _) in kept.items()
                }
                del kept[min(worths, key=lambda serial: worths[serial])]
    assert hits["rate"] > 1.1 * hits["age"]
