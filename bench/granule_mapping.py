"""Times of mapping physical memory into address ranges, alone and beside decode steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from kv_layouts import DTYPE, N_HEADS, Layout, Rows, random_tokens, spread
from virtual_memory import VirtualMemory

from radixkv.lab.studies.paging.schemes import HEAD_DIM, N_LAYERS, N_TENSORS, granule_tokens

Line = dict[str, Any]
AT_ONCE = ((1, 1), (8, 1), (N_TENSORS, 1), (1, N_TENSORS))
"""Ranges that grow together, and granules by which each grows."""
N_ROUNDS = 30
GROWING = Rows(256, 512)
"""Rows of the steps."""
PAGE_SIZE = 16
N_STEPS = 60
N_PAIRS = 5
MAX_KEPT = 128
"""Rounds that are mapped beside steps and not yet unmapped: of ``N_TENSORS`` granules, 16 GiB in all."""


def measure_mapping(memory: VirtualMemory) -> Iterator[Line]:
    """Yields the times of calls alone, what growing rows take of them, and the times beside steps."""
    granule = memory.minimum_granule
    begun = time.perf_counter()
    for _ in range(1000):
        memory.version()
    call_us = (time.perf_counter() - begun) * 1e3
    yield {
        "case": "granularity",
        "minimum_bytes": granule,
        "recommended_bytes": memory.recommended_granule,
        "granule_tokens": granule_tokens(granule),
        "call_us": round(call_us, 2),
    }
    for n_ranges, n_consecutive in AT_ONCE:
        mapper = Mapper(memory, n_ranges, n_consecutive, N_ROUNDS)
        for _ in range(N_ROUNDS):
            mapper.map()
            mapper.unmap()
        yield {"case": "alone", "granules": n_ranges * n_consecutive, "ranges": n_ranges, **mapper.line()}
        if n_ranges == N_TENSORS:
            yield growth(GROWING.n_rows, granule, mapper.line())
    yield from mapping_beside_steps(memory)


def growth(n_rows: int, granule_bytes: int, line: Line) -> Line:
    """Returns what rows need that grow by a token in each step, by the times of a line.

    With granules that were created before, only ``map`` and ``allow`` are left.
    """
    n_tokens = granule_tokens(granule_bytes)
    per_step = n_rows * N_TENSORS / n_tokens
    kept_us = line["map_us"] + line["allow_us"]
    return {
        "case": f"growth of {n_rows} rows",
        "granules_per_row": N_TENSORS,
        "tokens": n_tokens,
        "ms_per_row": round(N_TENSORS * (line["create_us"] + kept_us) / 1e3, 3),
        "granules_per_step": per_step,
        "us_per_step": round(per_step * (line["create_us"] + kept_us), 1),
        "us_per_step_created": round(per_step * kept_us, 1),
    }


class Mapper:
    """Maps granules into ranges, always at the next addresses, and takes the time.

    Args:
        memory: of the GPU.
        n_ranges: ranges that grow together, such as those of a row in all tensors.
        n_consecutive: granules by which each grows at once.
        n_rounds: how often they can grow before something is unmapped.
    """

    def __init__(self, memory: VirtualMemory, n_ranges: int, n_consecutive: int, n_rounds: int) -> None:
        self._memory = memory
        self._n_bytes = n_consecutive * memory.minimum_granule
        self._n_rounds = n_rounds
        self._ranges = [memory.reserve(n_rounds * self._n_bytes) for _ in range(n_ranges)]
        self._mapped: list[tuple[list[int], list[Any]]] = []
        self._n_mapped = 0
        self._times: dict[str, list[float]] = {}

    @property
    def has_room(self) -> bool:
        """Whether ``map`` can be called again before ``unmap``."""
        return len(self._mapped) < self._n_rounds

    def map(self) -> None:
        """Creates granules, maps them at the next addresses of each range, and allows access."""
        granule = self._memory.minimum_granule
        first = self._n_mapped % self._n_rounds * self._n_bytes
        places = [start + first for start in self._ranges]
        addresses = [place + offset for place in places for offset in range(0, self._n_bytes, granule)]
        with self._timed("create"):
            handles = [self._memory.create(granule) for _ in addresses]
        with self._timed("map"):
            for address, handle in zip(addresses, handles, strict=True):
                self._memory.map(address, granule, handle)
        with self._timed("allow"):
            for place in places:
                self._memory.allow(place, self._n_bytes)
        self._mapped.append((places, handles))
        self._n_mapped += 1

    def unmap(self) -> None:
        """Unmaps and releases what was mapped first."""
        places, handles = self._mapped.pop(0)
        with self._timed("unmap"):
            for place in places:
                self._memory.unmap(place, self._n_bytes)
        with self._timed("release"):
            for handle in handles:
                self._memory.release(handle)

    def unmap_all(self) -> None:
        """Unmaps and releases all."""
        while self._mapped:
            self.unmap()

    def line(self) -> Line:
        """Returns the number of rounds, and the spread of each operation's microseconds a granule."""
        spreads = [spread(f"{name}_us", times) for name, times in self._times.items()]
        return {"rounds": self._n_mapped, **{key: us for each in spreads for key, us in each.items()}}

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        n_granules = len(self._ranges) * self._n_bytes // self._memory.minimum_granule
        self._times.setdefault(name, []).append((time.perf_counter() - begun) * 1e6 / n_granules)


def mapping_beside_steps(memory: VirtualMemory) -> Iterator[Line]:
    """Yields the times of steps, and of what a thread maps meanwhile.

    A step is the attention of all layers. ``map`` maps without a pause, and unmaps between the runs of steps. ``map
    and unmap`` gives all back at once, also without a pause. ``growth`` does the same as often as a row of
    ``GROWING`` needs new granules.
    """
    steps = Steps(GROWING)
    steps_per_row = granule_tokens(memory.minimum_granule) // GROWING.n_rows
    for mode in ("map", "map and unmap", "growth"):
        mapper = Mapper(memory, N_TENSORS, 1, MAX_KEPT)
        alone, ratios, longest, longest_alone = [], [], [], []
        for _ in range(N_PAIRS):
            times = steps.run()
            alone.append(sum(times) / N_STEPS)
            longest_alone.append(max(times))
            due = threading.Semaphore(0)
            work = partial(map_again, mapper, keeps=mode == "map", due=due if mode == "growth" else None)
            with repeated_in_thread(memory, work):
                times = steps.run(partial(release_sometimes, due, steps_per_row))
            ratios.append(sum(times) / N_STEPS / alone[-1])
            longest.append(max(times))
            mapper.unmap_all()
        yield {
            "case": f"beside steps: {mode}",
            "granules": N_TENSORS,
            "ranges": N_TENSORS,
            **mapper.line(),
            "steps": N_PAIRS * N_STEPS,
            **spread("step_ms", alone, 3),
            **spread("step_ratio", ratios, 4),
            "longest_step_ms": round(median(longest), 3),
            "longest_step_alone_ms": round(median(longest_alone), 3),
        }


def release_sometimes(due: threading.Semaphore, n_steps: int, step: int) -> None:
    """Lets another row map in every so many steps."""
    if step % n_steps == 0:
        due.release()


def map_again(mapper: Mapper, *, keeps: bool, due: threading.Semaphore | None) -> None:
    """Maps once, and unmaps unless that is to be kept. Does nothing for a moment if it is not due, or full."""
    if not mapper.has_room or (due is not None and not due.acquire(timeout=0.001)):
        time.sleep(0.0001)
        return
    mapper.map()
    if not keeps:
        mapper.unmap()


@contextmanager
def repeated_in_thread(memory: VirtualMemory, work: Callable[[], None]) -> Iterator[None]:
    """Repeats ``work`` in a thread until the block ends, then raises what it raised."""
    stop = threading.Event()

    def run() -> None:
        memory.enter_thread()
        while not stop.is_set():
            work()

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(run)
        try:
            yield
        finally:
            stop.set()
        running.result()


class Steps:
    """Decode steps: attention of all layers over scattered pages, in a CUDA graph. Layers have the same K and V."""

    def __init__(self, rows: Rows) -> None:
        k, v = random_tokens(rows.n_stored), random_tokens(rows.n_stored)
        q = torch.randn(rows.n_rows, N_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
        attend = Layout("triton", "scattered", PAGE_SIZE).attend(rows, torch.empty(0, device="cuda"))
        self._layer = partial(attend, q, k, v, torch.empty_like(q))  # kept, as the graph reads these
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            self._layer()
            stream.synchronize()
            with torch.cuda.graph(self._graph, stream=stream):
                for _ in range(N_LAYERS):
                    self._layer()

    def run(self, on_step: Callable[[int], object] = lambda step: None) -> list[float]:
        """Runs steps, each launched while the one before computes. Returns the milliseconds between their ends."""
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(N_STEPS + 1)]
        ends[0].record()
        for step in range(1, N_STEPS + 1):
            on_step(step)
            self._graph.replay()
            ends[step].record()
            ends[step - 1].synchronize()
        ends[-1].synchronize()
        return [begin.elapsed_time(end) for begin, end in pairwise(ends)]
