"""Copies between the pool and pinned memory, against torch's indexing: the same bytes, and no others change."""

from __future__ import annotations

import os
import random
import select
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from kernel_support import DEVICE
from torch import Tensor

from radixkv.errors import ConfigError
from radixkv.runtime.device.memory.copy_threads import CopyThreads
from radixkv.runtime.device.memory.cuda.copy_pace import CopyPace
from radixkv.runtime.device.memory.cuda.driver import CudaDriver
from radixkv.runtime.device.memory.cuda.host_slots import CudaHostSlots
from radixkv.runtime.device.memory.cuda.kv_pool import CudaPool
from radixkv.runtime.device.memory.page_shape import LayerPlace, PageLayout, PageShape
from radixkv.runtime.tiers.stores.page_keys import KEY_BYTES, chain
from radixkv.runtime.tiers.stores.shared_memory.memory_store import SharedMemoryStore
from radixkv.runtime.tiers.stores.shared_memory.segment import Segment

LLAMA_8B = PageLayout.uniform(PageShape(32, 8, 16, 128, torch.bfloat16))
SMALL = PageLayout.uniform(PageShape(3, 1, 1, 64, torch.float16))
LARGER_THAN_STAGING = PageLayout.uniform(PageShape(48, 8, 64, 256, torch.bfloat16))
TWO_SHAPES = PageLayout(
    (PageShape(5, 3, 16, 64, torch.bfloat16), PageShape(2, 1, 16, 512, torch.bfloat16)),
    (*(LayerPlace(0, layer) for layer in range(5)), LayerPlace(1, 0), LayerPlace(1, 1)),
)


@contextmanager
def opened(
    page: PageLayout, n_pages: int, n_slots: int, *, paced: bool = False
) -> Iterator[tuple[CudaPool, CudaHostSlots]]:
    """Yields a pool of random values and host slots that are all usable."""
    pool = CudaPool(page, n_pages, torch.device(DEVICE, torch.cuda.current_device()))
    for cache in caches(pool):
        cache[:, :n_pages].normal_()
    torch.cuda.synchronize()
    slots = CudaHostSlots(pool, n_slots * page.n_bytes + 5, CudaDriver(), CopyPace(lambda: paced))
    try:
        while slots.n_usable < n_slots:
            time.sleep(0.01)
        yield pool, slots
    finally:
        slots.close()


def caches(pool: CudaPool) -> list[Tensor]:
    return [cache for part in pool.parts for cache in part]


def contents(pool: CudaPool) -> list[Tensor]:
    copies = [cache.clone() for cache in caches(pool)]
    torch.cuda.synchronize()  # nothing orders the copies of host slots behind this stream
    return copies


def move(expected: list[Tensor], sources: Sequence[int], destinations: Sequence[int]) -> None:
    for cache in expected:
        cache[:, list(destinations)] = cache[:, list(sources)]


def check(pool: CudaPool, expected: list[Tensor]) -> None:
    for cache, values in zip(caches(pool), expected, strict=True):
        assert torch.equal(cache, values)


@pytest.mark.parametrize(
    ("page", "n_copied"),
    [(LLAMA_8B, 1), (LLAMA_8B, 8), (LLAMA_8B, 27), (SMALL, 333), (LARGER_THAN_STAGING, 3), (TWO_SHAPES, 27)],
)
def test_pages_come_back_with_the_same_bytes(page: PageLayout, n_copied: int) -> None:
    n_pages = 2 * n_copied + 3
    with opened(page, n_pages, n_copied + 10) as (pool, host):
        rng = random.Random(n_copied)
        for _ in range(3):
            pages, slots = rng.sample(range(n_pages), 2 * n_copied), rng.sample(range(n_copied + 10), n_copied)
            sources, destinations = pages[:n_copied], pages[n_copied:]
            expected = contents(pool)
            move(expected, sources, destinations)
            host.store(sources, slots)
            host.load(slots, destinations)
            check(pool, expected)


def test_consecutive_slots_of_two_pinned_pieces() -> None:
    n_slots = (3 << 29) // LLAMA_8B.n_bytes
    with opened(LLAMA_8B, 32, n_slots) as (pool, host):
        edge = (1 << 30) // LLAMA_8B.n_bytes
        sources, destinations = range(16), range(16, 32)
        expected = contents(pool)
        move(expected, sources, destinations)
        slots = range(edge - 8, edge + 8)
        host.store(sources, slots)
        host.load(slots, destinations)
        check(pool, expected)


@pytest.mark.parametrize("paced", [False, True])
def test_loads_and_stores_at_the_same_time(paced: bool) -> None:
    """Each direction has pages and slots of its own; steps of other streams run meanwhile."""
    n, n_rounds = 40, 30
    with opened(LLAMA_8B, 4 * n, 2 * n, paced=paced) as (pool, host):
        host.store(range(n), range(n))
        expected = contents(pool)
        load_from = [random.Random(i).sample(range(n), n) for i in range(n_rounds)]
        for slots in load_from:
            for cache in expected:
                cache[:, n : 2 * n] = cache[:, slots]
        failures: list[BaseException] = []

        def run(copy: str) -> None:
            try:
                for i in range(n_rounds):
                    if copy == "load":
                        host.load(load_from[i], range(n, 2 * n))
                    else:
                        host.store(range(2 * n, 3 * n), range(n, 2 * n))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(copy,)) for copy in ("load", "store")]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            torch.randn(2048, 2048, device=DEVICE) @ torch.randn(2048, 2048, device=DEVICE)
            torch.cuda.synchronize()
        assert not failures
        host.load(range(n, 2 * n), range(3 * n, 4 * n))
        move(expected, range(2 * n, 3 * n), range(3 * n, 4 * n))
        check(pool, expected)


def test_copies_through_their_threads() -> None:
    with opened(LLAMA_8B, 64, 64) as (pool, host), closing(CopyThreads(host)) as copies:
        expected = contents(pool)
        assert copies.take_new_slots() == range(64)
        sources, slots, destinations = range(20), range(30, 50), range(40, 60)
        move(expected, sources, destinations)
        for start in (lambda: copies.store(sources, slots), lambda: copies.load(slots, destinations)):
            ticket = start()
            select.select([copies], [], [])
            (finished,) = copies.take_finished()
            assert (finished.ticket, finished.error) == (ticket, None)
        check(pool, expected)


def test_sizes_that_cannot_be() -> None:
    pool = CudaPool(LLAMA_8B, 2, torch.device(DEVICE, torch.cuda.current_device()))
    for n_bytes in (0, LLAMA_8B.n_bytes - 1, 1 << 60):
        with pytest.raises(ConfigError, match="host.memory"):
            CudaHostSlots(pool, n_bytes, CudaDriver(), CopyPace(lambda: False))


def test_closing_while_memory_is_pinned_gives_it_back() -> None:
    pool = CudaPool(LLAMA_8B, 2, torch.device(DEVICE, torch.cuda.current_device()))
    for _ in range(3):
        host = CudaHostSlots(pool, 30 << 30, CudaDriver(), CopyPace(lambda: False))
        assert host.n_slots == (30 << 30) // LLAMA_8B.n_bytes
        host.close()
        assert host.n_usable < host.n_slots


def test_pages_of_a_segment_are_copied_in_place(tmp_path: Path) -> None:
    """Of a file in memory that CUDA has registered, while another store cannot take the slots."""
    n = 27
    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    with opened(LLAMA_8B, 2 * n, n) as (pool, host), tempfile.TemporaryDirectory(dir=folder) as memory:
        pages, slots = random.sample(range(n), n), random.sample(range(n), n)
        host.store(pages, slots)
        url = f"shm://kv?size={(n + 5) * (LLAMA_8B.n_bytes + 8192)}&folder={memory}"
        stores = [
            SharedMemoryStore(Segment(url), "the segment", page_bytes=LLAMA_8B.n_bytes, page_token_bytes=64)
            for _ in range(2)
        ]
        tokens = os.urandom(64 * n)
        keys = chain(os.urandom(KEY_BYTES), tokens, 64)
        stores[0].store(keys, tokens, [host.buffer(slot) for slot in slots])
        while stores[1].run(keys) < n:
            time.sleep(0.01)
        host.map_slots(mapped := stores[1].mapped_slots)
        end = time.monotonic() + 60
        while host.n_mapped_slots < mapped.n_slots:
            assert time.monotonic() < end, "the mapping is not registered with CUDA"
            time.sleep(0.01)
        lent = stores[1].lend(keys, tokens, host.n_mapped_slots)
        assert lent is not None
        expected = contents(pool)
        destinations = random.sample(range(n, 2 * n), n)
        move(expected, pages, destinations)
        host.load([host.n_slots + slot for slot in lent], destinations)
        check(pool, expected)
        stores[1].give_back(keys, lent)
        own = [*slots[:5], *(host.n_slots + slot for slot in lent[5:])]
        host.load(own, destinations)
        check(pool, expected)
        for store in stores:
            store.close(1.0)
