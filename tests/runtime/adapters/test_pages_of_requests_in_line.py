"""Pages of requests that wait for a slot are spared and loaded ahead, as those of other waiting requests are."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.runtime.adapters import slot_queue
from radixkv.runtime.adapters.slots import AdapterSlots
from radixkv.runtime.request import Phase, Request
from radixkv.settings.config import SchedulePolicy
from radixkv.settings.tenants import TenantConfig
from support.engine import Engine, prompt
from support.fake_adapters import FakeDeviceAdapters
from support.fake_device import ACTIVATED, mark_of
from support.loop_frontend import done
from support.slot_frontend import SlotFrontend

N_PREFIX = 20
"""Tokens of each prefix that requests in line need: 5 pages."""
LONG_ANSWER = 90


def prefix(number: int) -> list[int]:
    return [number, *prompt(N_PREFIX - 1, first=number)]


def serve(front: SlotFrontend, tokens: list[int], **options: Any) -> None:
    front.serve(f"before {front.now}", tokens, max_tokens=1, **options)


def fill(front: SlotFrontend) -> None:
    """Begins the long answer of an adapter that has the only slot."""
    front.submit("sql", [80], adapter="12ab", max_tokens=LONG_ANSWER, ignore_eos=True)
    front.turn(4)
    assert front.adapters_device.in_slots == {"12ab"}


def n_cached(front: SlotFrontend, name: str) -> int:
    return done(front.received[name]).cache_use.n_cached


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
def test_pages_that_nobody_waits_for_go_first(policy: SchedulePolicy) -> None:
    """Those of requests in line have been used least recently."""
    front = SlotFrontend(1, n_pages=40, num_reserved_decode_tokens=0, schedule_policy=policy)
    for number in (1, 2):
        serve(front, prefix(number), adapter="34cd")
    for number in (50, 51):
        serve(front, prompt(40, first=number))
    fill(front)
    for number in (1, 2):
        front.submit(f"law {number}", [*prefix(number), 90], adapter="34cd", max_tokens=1)
    front.run()
    assert [n_cached(front, f"law {number}") for number in (1, 2)] == [N_PREFIX] * 2
    assert front.slots.n_loads == 3, "law has lost its slot to sql, and got it again"
    front.adapters.close()


@pytest.mark.parametrize("first", [1, 2])
def test_those_of_the_last_turn_go_first_once_all_are_needed(first: int) -> None:
    """The adapter that is chosen for the next slot comes first, then the one that has waited longer."""
    front = SlotFrontend(1, n_pages=34, num_reserved_decode_tokens=0, schedule_policy="fcfs")
    digests = {1: "34cd", 2: "56ef", 3: "78ab"}
    for number, digest in digests.items():
        serve(front, prefix(number), adapter=digest)
    fill(front)
    last = 3 - first
    for number in (3, first, last):
        front.submit(f"{number}", [*prefix(number), 90], adapter=digests[number], max_tokens=1)
        front.turn()
    front.run()
    assert [n_cached(front, f"{number}") for number in (3, first)] == [N_PREFIX] * 2
    assert n_cached(front, f"{last}") < N_PREFIX
    front.adapters.close()


def test_what_is_in_line_is_needed_after_the_queue_behind() -> None:
    """Next is the adapter that is chosen for a slot, then the one that has waited longer. Who reads no cache needs
    nothing."""
    front = SlotFrontend(1, max_num_seqs=1, schedule_policy="lpm")
    serve(front, prefix(1), adapter="56ef")
    fill(front)
    front.submit("tax", prefix(3), adapter="78ab")
    front.submit("medicine", prefix(1), adapter="56ef")
    front.turn()
    assert front.slots.is_coming("56ef")
    front.submit("law", prefix(2), adapter="34cd")
    front.submit("cold", prefix(2), adapter="34cd", reads_cache=False)
    front.submit("base", prefix(4))
    front.turn()
    assert needed(front) == ["base", "medicine", "tax", "law"]
    front.run()
    front.adapters.close()


def needed(front: SlotFrontend) -> list[str]:
    """Returns the ids of waiting requests, those whose pages are needed first in front."""
    return [one.id for one in front.scheduler.waiting.next_requests()]


def test_who_has_had_less_slot_time_is_needed_first() -> None:
    """Behind the adapter that is chosen for the next slot, also before those who have waited longer."""
    tenants = [TenantConfig(name, cache_salt="request") for name in ("busy", "chosen", "long", "short")]
    front = SlotFrontend(1, tenants=tenants)
    front.submit("sql", [80], adapter="12ab", tenant="busy", max_tokens=LONG_ANSWER, ignore_eos=True)
    front.turn(4)
    for name, digest in (("chosen", "78ab"), ("long", "34cd"), ("short", "56ef")):
        front.submit(name, prefix(1), adapter=digest, tenant=name, max_tokens=1)
        front.turn()
    assert front.slots.is_coming("78ab")
    assert needed(front) == ["chosen", "long", "short"]
    front.slots.queue._times.charge(["long"], 1.0)
    assert needed(front) == ["chosen", "short", "long"]
    front.slots.queue._times.charge(["chosen"], 2.0)
    assert needed(front) == ["chosen", "short", "long"]
    front.run()
    front.adapters.close()


@pytest.mark.parametrize(("most", "expected"), [(6, 6), (4, 3), (2, 2), (100, 15)])
def test_a_long_line_hides_no_other(monkeypatch: pytest.MonkeyPatch, most: int, expected: int) -> None:
    """Each of the three adapters in line has an equal part of the requests whose pages are spared."""
    monkeypatch.setattr(slot_queue, "_MAX_RANKED", most)
    front = SlotFrontend(1)
    fill(front)
    digests = ("34cd", "56ef", "78ab")
    for digest in digests:
        for number in range(5):
            front.submit(f"{digest} {number}", prefix(number), adapter=digest, max_tokens=1)
    found = needed(front)
    assert len(found) == expected
    n_each = max(1, most // 3)
    assert found == [f"{digest} {number}" for digest in digests for number in range(min(5, n_each))][:most]
    front.run()
    front.adapters.close()


def in_line(engine: Engine, number: int, adapter: str) -> Request:
    """Adds a request whose invocation follows a prefix that the host tier has."""
    return engine.add([*prefix(number), mark_of(adapter), 92], max_tokens=1)


def test_pages_are_loaded_ahead_for_requests_in_line() -> None:
    slots = AdapterSlots(FakeDeviceAdapters(sizes=dict.fromkeys(ACTIVATED, 1), n_slots=1), 1)
    engine = Engine(
        n_pages=64, page_size=4, n_slots=200, max_num_seqs=1, num_reserved_decode_tokens=0, adapter_slots=slots
    )
    for number in (1, 2):
        engine.serve(prefix(number), max_tokens=1)
    engine.store_all()
    engine.cache.flush()
    engine.add([90], max_tokens=LONG_ANSWER)
    engine.turn()
    waiting = [in_line(engine, number, ACTIVATED[0]) for number in (1, 2)]
    engine.turn(20)
    assert all(request.phase is Phase.WAITING for request in waiting)
    assert slots.queue.n_in_line() == 2
    assert [engine.n_cached(prefix(number)) for number in (1, 2)] == [N_PREFIX] * 2
    slots.queue.put(ACTIVATED[0])
    engine.run_to_the_end()
    uses = [request.cache_use.counted for request in waiting]
    assert [(use.n_cached, use.n_loaded) for use in uses] == [(N_PREFIX, N_PREFIX)] * 2, "the host tier gave them"
    slots.close()
