"""Times of a hit in memory that servers share: copied to the device in place, or through a slot of the host tier.

One JSON line for each size of a page and number of pages: microseconds a page, each way in turn in each round, of

    host     a load from slots of the own host tier
    in_place the loan of the pages, a load from the segment, and the end of the loan
    through  a load into slots of the host tier, as before, and another one from there

`ratio_in_place` and `ratio_through` are to `host` in the same round.

    python bench/copies_in_place.py --output-file copies_in_place.jsonl
    python bench/copies_in_place.py --device cpu --pages 1 32 --rounds 5
"""

from __future__ import annotations

import argparse
import os
import select
import tempfile
import time
from collections.abc import Callable, Sequence
from random import Random
from statistics import median
from typing import Any

import torch
from result_lines import add_gpu_flags, report, script_parser

from gpu import gpu_provenance
from radixkv.runtime.device.memory.copy_threads import CopyThreads, HostSlots
from radixkv.runtime.device.memory.cpu.host_slots import CpuHostSlots
from radixkv.runtime.device.memory.cpu.kv_pool import KVPool
from radixkv.runtime.device.memory.page_shape import PageLayout, PageShape
from radixkv.runtime.tiers.stores.page_keys import KEY_BYTES, chain
from radixkv.runtime.tiers.stores.shared_memory.memory_store import SharedMemoryStore
from radixkv.runtime.tiers.stores.shared_memory.segment import Segment

SHAPES = {
    "tiny": PageShape(n_layers=5, n_kv_heads=2, page_size=16, head_dim=64, dtype=torch.float32),
    "8B": PageShape(n_layers=32, n_kv_heads=8, page_size=16, head_dim=128, dtype=torch.bfloat16),
}
"""Of a page of the embedded model, 80 KiB, and of Llama 3.1 8B, 2 MiB."""
PAGE_TOKEN_BYTES = 64
STORED_PAGES = 64
"""Pages that are stored at once: a store takes at most 256 MiB before it has written some."""
MAX_PINNING_S = 60.0
"""How long the pinning of a few GiB may take."""


def main() -> None:
    parser = script_parser(__doc__)
    add_gpu_flags(parser)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 16, 64, 256], help="of a hit")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", default="/dev/shm", help="where the segment is made (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("copies_in_place.py needs an NVIDIA GPU, and torch finds none; try --device cpu")
    about = {"benchmark": "copies_in_place", **gpu_provenance(arguments.device, arguments.commit)}
    for model in arguments.models:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            hits = Hits(SHAPES[model], max(arguments.pages), folder, arguments)
            for n_pages in arguments.pages:
                line = hits.measure(n_pages, arguments.rounds)
                report(arguments.output_file, {"device": arguments.device, "model": model, **line}, about)
            hits.close()


class Hits:
    """A store, host slots and a pool with the same pages, in random order.

    Args:
        page: the shape of a page.
        n_pages: pages that there are.
        folder: where the segment is made.
        arguments: with ``device``.
    """

    def __init__(self, page: PageShape, n_pages: int, folder: str, arguments: argparse.Namespace) -> None:
        layout = PageLayout.uniform(page)
        self._n_slots = 2 * n_pages
        slots = open_slots(arguments.device, layout, n_pages, self._n_slots)
        self._copier = CopyThreads(slots)
        n_bytes = (2 * n_pages + 300) * (layout.n_bytes + 8192)
        self._store = SharedMemoryStore(
            Segment(f"shm://bench?size={n_bytes}&folder={folder}"),
            "the segment",
            page_bytes=layout.n_bytes,
            page_token_bytes=PAGE_TOKEN_BYTES,
        )
        self._copier.map_slots(mapped := self._store.mapped_slots)
        end = time.monotonic() + MAX_PINNING_S
        while slots.n_usable < self._n_slots or slots.n_mapped_slots < mapped.n_slots:
            if time.monotonic() > end:
                raise SystemExit("memory cannot be pinned; see ulimit -l, and give a --folder in memory (tmpfs)")
            time.sleep(0.01)
        random = Random(n_pages)
        numbers = random.sample(range(self._n_slots), self._n_slots)
        self._own, self._free = numbers[:n_pages], numbers[n_pages:]
        self._pages = random.sample(range(n_pages), n_pages)
        self._tokens = os.urandom(n_pages * PAGE_TOKEN_BYTES)
        self._keys = chain(os.urandom(KEY_BYTES), self._tokens, PAGE_TOKEN_BYTES)
        for slot in numbers:
            self._copier.buffer(slot)[:] = os.urandom(1) * layout.n_bytes
        buffers = [self._copier.buffer(slot) for slot in self._own]
        for first in range(0, n_pages, STORED_PAGES):
            some = slice(first, first + STORED_PAGES)
            tokens = self._tokens[some.start * PAGE_TOKEN_BYTES : some.stop * PAGE_TOKEN_BYTES]
            stored = self._store.store(self._keys[some], tokens, buffers[some])
            self._wait(self._store, stored, len(buffers[some]))
        self._page_bytes = layout.n_bytes

    def measure(self, n_pages: int, n_rounds: int) -> dict[str, Any]:
        """Returns the line of a number of pages."""
        ways: dict[str, Callable[[int], None]] = {
            "host": self._from_host,
            "in_place": self._in_place,
            "through": self._through,
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(n_rounds + 1):  # the first one does not count
            for name, way in ways.items():
                begun = time.perf_counter()
                way(n_pages)
                if number:
                    times[name].append(time.perf_counter() - begun)
        line: dict[str, Any] = {"pages": n_pages, "page_bytes": self._page_bytes, "rounds": n_rounds}
        for name, seconds in times.items():
            line[f"{name}_us"] = round(1e6 * median(seconds) / n_pages, 1)
        for name in ("in_place", "through"):
            ratios = [one / host for one, host in zip(times[name], times["host"], strict=True)]
            line[f"ratio_{name}"] = round(median(ratios), 3)
        return line

    def close(self) -> None:
        """Ends the copies, and lets go of the segment."""
        self._copier.close()
        self._store.close(1.0)

    def _from_host(self, n_pages: int) -> None:
        self._load(self._own[:n_pages])

    def _in_place(self, n_pages: int) -> None:
        keys, tokens = self._keys[:n_pages], self._tokens[: n_pages * PAGE_TOKEN_BYTES]
        slots = self._store.lend(keys, tokens, self._copier.n_mapped_slots)
        assert slots is not None, "nobody else uses the segment"
        self._load([self._n_slots + slot for slot in slots])
        self._store.give_back(keys, slots)

    def _through(self, n_pages: int) -> None:
        keys, tokens = self._keys[:n_pages], self._tokens[: n_pages * PAGE_TOKEN_BYTES]
        buffers = [self._copier.buffer(slot) for slot in self._free[:n_pages]]
        self._wait(self._store, self._store.load(keys, tokens, buffers), n_pages)
        self._load(self._free[:n_pages])

    def _load(self, slots: Sequence[int]) -> None:
        ticket = self._copier.load(slots, self._pages[: len(slots)])
        select.select([self._copier], [], [])
        (finished,) = self._copier.take_finished()
        assert (finished.ticket, finished.error) == (ticket, None), finished

    def _wait(self, store: SharedMemoryStore, ticket: int, n_pages: int) -> None:
        select.select([store.fileno()], [], [])
        (finished,) = store.take_finished()
        assert (finished.ticket, finished.n_pages) == (ticket, n_pages), finished


def open_slots(device: str, layout: PageLayout, n_pages: int, n_slots: int) -> HostSlots:
    """Returns the host slots of a pool."""
    n_bytes = n_slots * layout.n_bytes
    if device == "cpu":
        return CpuHostSlots(KVPool(layout, n_pages), n_bytes)
    from radixkv.runtime.device.memory.cuda.copy_pace import CopyPace
    from radixkv.runtime.device.memory.cuda.driver import CudaDriver
    from radixkv.runtime.device.memory.cuda.host_slots import CudaHostSlots
    from radixkv.runtime.device.memory.cuda.kv_pool import CudaPool

    pool = CudaPool(layout, n_pages, torch.device("cuda", torch.cuda.current_device()))
    return CudaHostSlots(pool, n_bytes, CudaDriver(), CopyPace(lambda: False))


if __name__ == "__main__":
    main()
