"""Copies of pages between a GPU's pool and pinned host memory, alone and beside decode steps, in the shape of
Llama 3.1 8B.

The copies take random pages and slots, one job after the other. One JSON line for each

- number of pages a job, alone: GB/s of loads, of stores, and of both at the same time;
- decode step: its milliseconds without copies, and the ratios of the times with and without, in pairs of runs that
  follow each other, while loads, stores, both, or the pinning of more host memory go on.

    python bench/page_copies.py --output-file page_copies.jsonl
    python bench/page_copies.py --small --rounds 2               # tries the code
"""

from __future__ import annotations

import argparse
import select
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median

from profile_step import open_device, run_overlapping
from result_lines import add_gpu_flags, report, script_parser
from shapes import LLAMA_8B, SMALL, write_model
from step_plans import MAX_STEPS, Case, Plans

from gpu import gpu_provenance
from radixkv.runtime.device.cuda.executor import CudaExecutor
from radixkv.runtime.device.memory.copy_threads import CopyThreads

JOBS = (1, 8, 32, 128, 512)
"""Pages of a job."""
JOB_BESIDE_STEPS = 32
CASES = (Case("decode 64x1024", 64, 1024), Case("decode 256x1650", 256, 1650))
MODES: dict[str, tuple[str, ...]] = {"load": ("load",), "store": ("store",), "both": ("load", "store")}
N_STEPS = 60
GIB = 1 << 30
SECONDS_ALONE = 1.0
MAX_RANDOM = 20_000
"""Most slots and pages that a thread chooses from."""


def main() -> None:
    parser = script_parser(__doc__)
    add_gpu_flags(parser, has_device=False)
    parser.add_argument("--small", action="store_true", help="a small model")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of runs with and without copies")
    parser.add_argument("--host-gib", type=int, default=8, help="host memory")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = argparse.Namespace(device="cuda", enforce_eager=False, max_num_seqs=256)
        executor = open_device(options, write_model(SMALL if arguments.small else LLAMA_8B, Path(folder)))
    assert isinstance(executor, CudaExecutor)
    about = {"benchmark": "page_copies", **gpu_provenance("cuda", arguments.commit)}
    for line in measure(executor, arguments.host_gib, arguments.rounds):
        report(arguments.output_file, line, about)
    executor.close()


def measure(executor: CudaExecutor, host_gib: int, n_rounds: int) -> Iterator[dict[str, object]]:
    """Yields the lines of copies alone, then of copies beside steps."""
    begun = time.perf_counter()
    copier = executor.open_copier(host_gib * GIB)
    opened_s = time.perf_counter() - begun
    while copier.take_new_slots().stop < copier.n_slots:
        time.sleep(0.01)
    yield {"host_gib": host_gib, "open_s": round(opened_s, 2), "pinned_s": round(time.perf_counter() - begun, 2)}
    for n_pages in JOBS:
        rates = {}
        for mode, directions in MODES.items():
            with copying(copier, executor.n_pages, n_pages, directions) as speeds:
                time.sleep(SECONDS_ALONE)
            rates |= {f"{mode}: {direction}_gb_per_s": round(speed, 1) for direction, speed in speeds.items()}
        yield {"pages": n_pages, "page_bytes": copier.page_bytes, **rates}
    for case in CASES:
        yield beside_steps(executor, copier, case, n_rounds)
    copier.close()


def beside_steps(executor: CudaExecutor, copier: CopyThreads, case: Case, n_rounds: int) -> dict[str, object]:
    """Returns the step's milliseconds without copies, and ratios with each kind of copy."""
    steps = StepTimer(executor, case)
    alone: list[float] = []
    ratios: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    for _ in range(n_rounds):
        for mode, directions in MODES.items():
            alone.append(steps.milliseconds())
            with copying(copier, executor.n_pages, JOB_BESIDE_STEPS, directions) as found:
                ratios.setdefault(mode, []).append(steps.milliseconds() / alone[-1])
            for direction, rate in found.items():
                rates.setdefault(f"{mode}: {direction}_gb_per_s", []).append(rate)
        alone.append(steps.milliseconds())
        more = executor.open_copier(4 * GIB)
        ratios.setdefault("pinning", []).append(steps.milliseconds() / alone[-1])
        more.close()
    return {
        "case": case.name,
        "pages": JOB_BESIDE_STEPS,
        "rounds": n_rounds,
        "steps": N_STEPS,
        "ms_per_step": round(median(alone), 3),
        **{key: round(median(values), 1) for key, values in rates.items()},
        **{
            f"{mode}: ratio_{name}": round(of(values), 4)
            for mode, values in ratios.items()
            for name, of in (("median", median), ("min", min), ("max", max))
        },
    }


class StepTimer:
    """Times decode steps of one case, each time the same ones."""

    def __init__(self, executor: CudaExecutor, case: Case) -> None:
        self._executor = executor
        self._case = case
        self._first_step = 0
        self.milliseconds()

    def milliseconds(self) -> float:
        """Returns the milliseconds of an overlapping step, after a warm-up."""
        plans = Plans(self._case, self._executor.n_pages, self._first_step)
        self._first_step += MAX_STEPS
        run_overlapping(self._executor, plans, 5)
        begun = time.perf_counter()
        run_overlapping(self._executor, plans, N_STEPS)
        return 1e3 * (time.perf_counter() - begun) / N_STEPS


@contextmanager
def copying(
    copier: CopyThreads, n_pool_pages: int, n_pages: int, directions: Sequence[str]
) -> Iterator[dict[str, float]]:
    """Copies jobs of random pages and slots during the block, of which each direction always has two in its queue.

    Then the dictionary has each direction's GB/s.
    """
    stop = threading.Event()
    rates: dict[str, float] = {}

    def run() -> None:
        rng, begun = Random(n_pages), time.perf_counter()
        starts = {direction: random_jobs(copier, rng, n_pool_pages, n_pages, direction) for direction in directions}
        n_done = dict.fromkeys(directions, 0)
        tickets = {starts[direction](): direction for direction in directions for _ in range(2)}
        while tickets:
            select.select([copier], [], [])
            for finished in copier.take_finished():
                direction = tickets.pop(finished.ticket)
                n_done[direction] += n_pages
                if not stop.is_set():
                    tickets[starts[direction]()] = direction
        seconds = time.perf_counter() - begun
        rates.update({direction: n * copier.page_bytes / seconds / 1e9 for direction, n in n_done.items()})

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield rates
    finally:
        stop.set()
        thread.join()


def random_jobs(
    copier: CopyThreads, rng: Random, n_pool_pages: int, n_pages: int, direction: str
) -> Callable[[], int]:
    """Returns a function that starts a job and returns its ticket. Each direction has half of slots and pages."""
    is_load = direction == "load"
    half, half_pool = copier.n_slots // 2, n_pool_pages // 2
    slots = rng.sample(range(half * is_load, half * is_load + half), min(half, MAX_RANDOM))
    pages = rng.sample(range(half_pool * is_load, half_pool * is_load + half_pool), min(half_pool, MAX_RANDOM))

    def start() -> int:
        some_slots, some_pages = (
            own[(first := rng.randrange(len(own) - n_pages)) : first + n_pages] for own in (slots, pages)
        )
        return copier.load(some_slots, some_pages) if is_load else copier.store(some_pages, some_slots)

    return start


if __name__ == "__main__":
    main()
