"""Measures what cache events and metrics cost the runtime's loop: host time of a turn with and without them.

256 rows decode; in each step a request ends, and one with a new prompt begins, so that the full pool loses as many
pages as it gets: about 100 events of pages in a step, 5,000 a second in steps of 20 ms. Three subscribers of
another process are connected, of which one does not read. No device runs: step results are generated at once, so
the host's time is all there is. On a GPU it passes while the device computes (``gpu_events.py``). Times are
processor times of the loop's thread, so that other processes of the machine count only as far as they slow the
processor down. Against that, each pair has four short runs: with, without, without, with.

Appends one JSON line: the median over pairs of the milliseconds that a turn takes without and with events, what
``KVEvents.advance`` takes of them, and what one report of the metrics takes, apart. ``percent_of_20_ms`` is the
difference and the part of a report every 10 s as a share of such a step. ``snapshot_ms`` is the time of a snapshot
of the whole pool.
"""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from random import Random
from statistics import fmean, median

from result_lines import report, script_parser
from schedule import NullDevice

from radixkv.lab.bench.environment import provenance
from radixkv.runtime.assemble import assemble_loop, open_event_log, open_scheduler
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.events.kv_events import KVEvents
from radixkv.runtime.events.publisher import EventPublisher
from radixkv.runtime.loop import Loop
from radixkv.runtime.scheduler.scheduler import SchedulerLimits
from radixkv.runtime.step.executor import Executor
from radixkv.settings.kv_events import KVEventsConfig
from radixkv.wire.messages import GetStats, Submit
from radixkv.wire.sampling import SamplingParams

PAGE_SIZE = 16
VOCAB_SIZE = 30_000
N_PROMPT = 544
N_OUTPUT = 256
STEP_MS = 20.0
STEPS_PER_STATS = 500
N_STATS = 20
SUBSCRIBER = """
import sys, time, zmq
context = zmq.Context()
sockets = [context.socket(zmq.SUB) for _ in range(3)]
for socket in sockets:
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(sys.argv[1])
stuck, *readers = sockets
print("connected", flush=True)
poller = zmq.Poller()
for reader in readers:
    poller.register(reader, zmq.POLLIN)
while True:
    for reader, _ in poller.poll():
        reader.recv_multipart()
"""


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--pages", type=int, default=20_000, help="pages of the pool (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=50, help="steps of each of the four runs (default: %(default)s)"
    )
    parser.add_argument(
        "--pairs", type=int, default=40, help="pairs of runs with and without (default: %(default)s)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, subscribed(f"ipc://{folder}/events") as publisher:
        report(
            arguments.output_file,
            measure(arguments.rows, arguments.pages, arguments.steps, arguments.pairs, publisher),
            provenance(),
        )


@contextlib.contextmanager
def subscribed(endpoint: str) -> Iterator[EventPublisher]:
    """Opens a publisher with three subscribers in another process, of which one does not read."""
    publisher = EventPublisher(KVEventsConfig(endpoint))
    process = subprocess.Popen([sys.executable, "-c", SUBSCRIBER, endpoint], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.5)  # until the subscriptions have come
        yield publisher
    finally:
        process.kill()
        process.wait()
        publisher.close()


class Traffic:
    """A loop with as many running requests as it has rows; each that ends is followed by one with a new prompt.

    Args:
        n_rows: rows of a step.
        device: computes the steps; its pool is filled.
        publisher: publishes the loop's events; None: no events.
        clock: seconds, by which runs are measured.
    """

    def __init__(
        self,
        n_rows: int,
        device: Executor,
        publisher: EventPublisher | None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        n_pages = device.n_pages
        cache = PageCache(n_pages, PAGE_SIZE)
        limits = SchedulerLimits(max_num_seqs=n_rows, max_num_batched_tokens=8192)
        scheduler = open_scheduler(cache, limits, finds_shared_runs=device.uses_shared_runs)
        self.loop = assemble_loop(scheduler, device, max_model_len=N_PROMPT + N_OUTPUT)
        self.log = open_event_log(self.loop, shows_salted_tokens=False) if publisher is not None else None
        self.events = KVEvents(self.log, publisher) if publisher is not None and self.log is not None else None
        self.cache = cache
        self._clock = clock
        self._rng = Random(1)
        self._n_submitted = 0
        for row in range(n_rows):
            self._submit(1 + row * N_OUTPUT // n_rows)
        while cache.n_evicted < n_pages // 10:
            self.run(50)

    def run(self, n_steps: int) -> RunTimes:
        """Runs some steps; returns the mean times of a turn."""
        advance_s = 0.0
        started = self._clock()
        for _ in range(n_steps):
            messages = self.loop.turn()
            if self.events is not None:
                before = self._clock()
                self.events.advance()
                advance_s += self._clock() - before
            for message in messages:
                if type(message).__name__ == "Done":
                    self._submit(N_OUTPUT)
        return RunTimes(*(1e3 * each / n_steps for each in (self._clock() - started, advance_s)))

    def _submit(self, n_output: int) -> None:
        prompt = array("i", (self._rng.randrange(10, VOCAB_SIZE) for _ in range(N_PROMPT)))
        sampling = SamplingParams(temperature=0.0, max_tokens=n_output, ignore_eos=True)
        self._n_submitted += 1
        assert not self.loop.receive(Submit(str(self._n_submitted), prompt.tobytes(), sampling))


@dataclass(frozen=True)
class RunTimes:
    """Milliseconds of a turn, its requests' submission included, and of its events."""

    turn_ms: float
    advance_ms: float

    @classmethod
    def mean(cls, *runs: RunTimes) -> RunTimes:
        return cls(*map(fmean, zip(*map(astuple, runs), strict=True)))


def pair(off: Traffic, on: Traffic, n_steps: int) -> tuple[RunTimes, RunTimes]:
    """Returns the times without and with events, each the mean of two runs."""
    first, *without, last = (traffic.run(n_steps) for traffic in (on, off, off, on))
    return RunTimes.mean(*without), RunTimes.mean(first, last)


def _stats_ms(loop: Loop) -> float:
    """Returns the milliseconds of one report of the metrics."""
    started = time.thread_time()
    loop.receive(GetStats("stats"))
    return (time.thread_time() - started) * 1e3


def measure(n_rows: int, n_pages: int, n_steps: int, n_pairs: int, publisher: EventPublisher) -> dict[str, object]:
    """Alternates runs without and with events; returns the metrics."""
    off, on = (Traffic(n_rows, NullDevice(n_pages, VOCAB_SIZE), each) for each in (None, publisher))
    gc.collect()
    gc.disable()
    n_before, n_batches = on.cache.n_evicted, publisher.next_number
    pairs = [pair(off, on, n_steps) for _ in range(n_pairs)]
    n_removed = (on.cache.n_evicted - n_before) / (2 * n_pairs * n_steps)
    differences = sorted(with_events.turn_ms - without.turn_ms for without, with_events in pairs)
    assert on.log is not None
    started = time.thread_time()
    n_blocks = sum(len(event.block_hashes) for event in on.log.snapshot())
    snapshot_ms = (time.thread_time() - started) * 1e3
    stats_ms = median(_stats_ms(on.loop) for _ in range(N_STATS))
    gc.enable()
    difference = median(differences)
    return {
        "case": "three_subscribers_one_stuck",
        "rows": n_rows,
        "page_events_per_step": round(2 * n_removed, 1),
        "page_events_per_s_at_20_ms": round(2 * n_removed * 1e3 / STEP_MS),
        "batches": publisher.next_number - n_batches,
        "turn_ms_off": round(median(without.turn_ms for without, _ in pairs), 4),
        "turn_ms_on": round(median(with_events.turn_ms for _, with_events in pairs), 4),
        "difference_ms": round(difference, 4),
        "difference_quartiles_ms": [
            round(differences[len(differences) // 4], 4),
            round(differences[-1 - len(differences) // 4], 4),
        ],
        "advance_ms": round(median(with_events.advance_ms for _, with_events in pairs), 4),
        "stats_ms": round(stats_ms, 4),
        "percent_of_20_ms": round(100 * (difference + stats_ms / STEPS_PER_STATS) / STEP_MS, 2),
        "snapshot_pages": n_blocks,
        "snapshot_ms": round(snapshot_ms, 1),
        "pairs": n_pairs,
        "steps": n_steps,
    }


if __name__ == "__main__":
    main()
