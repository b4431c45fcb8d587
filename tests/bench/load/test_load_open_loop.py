"""Open loops: when sessions begin, and from when on latencies count."""

import itertools
import math
import time

import pytest

from radixkv.bench.load.arrivals import Load
from radixkv.bench.session import Request, lone
from support.loads import chat, send

RATE = 40.0


def timed(arrivals):
    """A session of one token at each time of a clock."""
    return [lone(Request(f"prompt {place}", 1), at) for place, at in enumerate(arrivals)]


def test_arrivals_are_poisson_with_the_rate_and_repeat_with_the_seed():
    sessions = timed([None] * 4001)
    load = Load("m", request_rate=20.0, seed=5)
    times = load.arrivals(sessions)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    assert sum(gap < mean * math.log(2) for gap in gaps) == pytest.approx(2000, rel=0.05)
    assert times == load.arrivals(sessions)
    assert times != Load("m", request_rate=20.0, seed=6).arrivals(sessions)


def test_the_clock_of_a_data_set_counts_unless_a_rate_replaces_it():
    sessions = timed([0.0, 3.0, 10.0])
    assert Load("m").arrivals(sessions) == [0.0, 3.0, 10.0]
    assert Load("m", speed=4.0).arrivals(sessions) == [0.0, 0.75, 2.5]
    assert Load("m", request_rate=math.inf).arrivals(sessions) is None
    assert Load("m", request_rate=1.0).arrivals(sessions) not in ([0.0, 3.0, 10.0], None)
    assert Load("m").arrivals(timed([None, None])) is None


def test_sessions_begin_by_their_clock_in_whichever_order_they_are(fake):
    measurement = send(fake.address, timed([0.9, 0.0, 0.6]), speed=3.0, max_concurrency=None)
    due = [record.scheduled - measurement.started for record in measurement.records]
    assert due == pytest.approx([0.3, 0.0, 0.2])
    assert sorted(range(3), key=lambda place: measurement.records[place].started) == [1, 2, 0]
    assert {body["prompt"] for body in fake.bodies} == {"prompt 0", "prompt 1", "prompt 2"}
    for record in measurement.records:
        assert record.waited == record.started - record.scheduled >= 0


def test_a_server_that_stalls_is_late_for_all_that_was_due_meanwhile(fake):
    """No coordinated omission: what was due ``t`` seconds into a stall of ``s`` seconds takes ``s - t``."""
    fake.stall = 2.0
    prompts = [Request(f"prompt {n}", 1) for n in range(40)]
    measurement = send(fake.address, prompts, request_rate=RATE, max_concurrency=None)
    for record in measurement.records:
        due = record.scheduled - measurement.started
        assert fake.stall - due <= record.latency + 1e-3
        assert record.latency <= measurement.duration - due
    assert fake.most_in_flight > 20  # nobody waited with sending


def test_waiting_for_room_counts(fake):
    """One at a time: each waits for what is left of all before it, by Lindley's recursion."""
    fake.delay = 0.04
    prompts = [Request(f"prompt {n}", 2) for n in range(20)]
    measurement = send(fake.address, prompts, request_rate=RATE, max_concurrency=1)
    assert fake.most_in_flight == 1
    served_s = 2 * fake.delay
    wait_s = 0.0
    for before, record in itertools.pairwise(measurement.records):
        wait_s = max(0.0, wait_s + served_s - (record.scheduled - before.scheduled))
        assert record.waited >= wait_s
        assert record.ttft >= record.waited
        assert record.latency >= wait_s + fake.delay
    assert wait_s > 0.4


def test_in_a_closed_loop_waiting_for_room_does_not_count(fake):
    fake.delay = 0.04
    measurement = send(fake.address, ["one", "two", "three"], max_concurrency=1)
    assert [(record.scheduled, record.waited) for record in measurement.records] == [(None, 0.0)] * 3
    assert sum(record.latency for record in measurement.records) <= measurement.duration


def test_a_later_turn_is_due_when_the_answer_before_it_is_there(fake):
    fake.delay = 0.02
    sessions = [chat("one:", " two:"), chat("uno:", " due:")]
    records = send(fake.address, sessions, request_rate=1000.0, max_concurrency=None).records
    for before, after in ((records[0], records[1]), (records[2], records[3])):
        assert before.started + before.arrivals[-1] <= after.scheduled <= after.started


def test_making_the_next_turn_ready_is_lateness_of_the_client(fake):
    class Slow:
        def encode(self, request):
            time.sleep(0.2)
            return request

    _, later = send(fake.address, [chat("one:", " two:")], encoder=Slow(), request_rate=100.0).records
    assert later.waited >= 0.2
    assert later.ttft >= 0.2
