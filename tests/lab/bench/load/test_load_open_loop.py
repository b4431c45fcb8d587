"""Open loops: starts of sessions and of latencies."""

import itertools
import math
import time

import pytest

from radixkv.lab.bench.load.arrivals import Load
from radixkv.lab.bench.session import BenchRequest, single_request_session
from support.loads import chat, send

RATE = 40.0


def timed(arrivals):
    """Returns a session of one token for each arrival time."""
    return [
        single_request_session(BenchRequest(f"prompt {index}", 1), arrival)
        for index, arrival in enumerate(arrivals)
    ]


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


def test_arrival_times_of_a_data_set_apply_unless_there_is_a_rate():
    sessions = timed([0.0, 3.0, 10.0])
    assert Load("m").arrivals(sessions) == [0.0, 3.0, 10.0]
    assert Load("m", speed=4.0).arrivals(sessions) == [0.0, 0.75, 2.5]
    assert Load("m", request_rate=math.inf).arrivals(sessions) is None
    assert Load("m", request_rate=1.0).arrivals(sessions) not in ([0.0, 3.0, 10.0], None)
    assert Load("m").arrivals(timed([None, None])) is None


def test_sessions_start_at_their_arrival_times_in_any_order(fake):
    measurement = send(fake.address, timed([0.9, 0.0, 0.6]), speed=3.0, max_concurrency=None)
    due = [record.scheduled - measurement.started for record in measurement.records]
    assert due == pytest.approx([0.3, 0.0, 0.2])
    assert sorted(range(3), key=lambda index: measurement.records[index].started) == [1, 2, 0]
    assert {body["prompt"] for body in fake.bodies} == {"prompt 0", "prompt 1", "prompt 2"}
    for record in measurement.records:
        assert record.lateness == record.started - record.scheduled >= 0


def test_a_stall_delays_every_request_that_is_due_during_it(fake):
    """No coordinated omission: a request due ``t`` seconds into a stall of ``s`` seconds takes ``s - t``."""
    fake.stall = 2.0
    prompts = [BenchRequest(f"prompt {n}", 1) for n in range(40)]
    measurement = send(fake.address, prompts, request_rate=RATE, max_concurrency=None)
    for record in measurement.records:
        due = record.scheduled - measurement.started
        assert fake.stall - due <= record.latency + 1e-3
        assert record.latency <= measurement.duration - due
    assert fake.most_in_flight > 20  # the client did not wait


def test_latency_includes_waiting_for_max_concurrency(fake):
    """With one request at a time, waiting times follow Lindley's recursion."""
    fake.delay = 0.04
    prompts = [BenchRequest(f"prompt {n}", 2) for n in range(20)]
    measurement = send(fake.address, prompts, request_rate=RATE, max_concurrency=1)
    assert fake.most_in_flight == 1
    served_s = 2 * fake.delay
    wait_s = 0.0
    for before, record in itertools.pairwise(measurement.records):
        wait_s = max(0.0, wait_s + served_s - (record.scheduled - before.scheduled))
        assert record.lateness >= wait_s
        assert record.ttft >= record.lateness
        assert record.latency >= wait_s + fake.delay
    assert wait_s > 0.4


def test_in_a_closed_loop_latency_excludes_waiting(fake):
    fake.delay = 0.04
    measurement = send(fake.address, ["one", "two", "three"], max_concurrency=1)
    assert [(record.scheduled, record.lateness) for record in measurement.records] == [(None, 0.0)] * 3
    assert sum(record.latency for record in measurement.records) <= measurement.duration


def test_a_later_turn_is_due_when_the_previous_answer_is_complete(fake):
    fake.delay = 0.02
    sessions = [chat("one:", " two:"), chat("uno:", " due:")]
    records = send(fake.address, sessions, request_rate=1000.0, max_concurrency=None).records
    for before, after in ((records[0], records[1]), (records[2], records[3])):
        assert before.started + before.arrivals[-1] <= after.scheduled <= after.started


def test_building_the_next_turn_counts_as_lateness(fake):
    class Slow:
        def encode(self, request):
            time.sleep(0.2)
            return request

    _, later = send(fake.address, [chat("one:", " two:")], encoder=Slow(), request_rate=100.0).records
    assert later.lateness >= 0.2
    assert later.ttft >= 0.2
