"""Rows with a common prefix: granules that are mapped into each row's addresses, beside pages in block tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from attention import Ints
from kv_layouts import (
    DTYPE,
    KV_BYTES,
    N_HEADS,
    decode,
    random_tokens,
    relative_error,
    slots_of,
    spread,
    time_rounds,
)
from torch import Tensor
from virtual_memory import VirtualMemory, tensor_at

from radixkv.lab.studies.paging.schemes import HEAD_DIM, N_KV_HEADS, N_LAYERS, N_TENSORS, granule_tokens
from radixkv.runtime.step.plan import SharedRun

Line = dict[str, Any]
PAGE_SIZE = 16
ROW_TOKENS = 8192
"""Tokens that each row has addresses for."""
USED_LAYERS = 4
"""Layers that are read: calls take turns among them, so that the GPU's cache does not keep one's K and V."""
N_CALLS = 20
NEEDED_BYTES = 50 << 30
"""Free memory for the largest of ``SHARED``, stored by all schemes at once."""


@dataclass(frozen=True)
class SharedRows:
    """Decode rows that begin with the same tokens, and go on with their own."""

    n_rows: int
    n_prefix: int
    n_own: int

    @property
    def n_tokens(self) -> int:
        """Tokens of a row."""
        return self.n_prefix + self.n_own

    def tables(self, unit_tokens: int, *, shares: bool) -> Ints:
        """Returns [rows, units of a row] int32: the physical page or granule behind each of a row's units.

        Rows share only units that the prefix fills. Physical units are numbered from 0.

        Args:
            unit_tokens: tokens of a page, or of a granule of one layer's K.
            shares: whether rows share units, or have copies.
        """
        n_shared = self.n_prefix // unit_tokens if shares else 0
        n_own = -(-self.n_tokens // unit_tokens) - n_shared
        shared = np.tile(np.arange(n_shared), (self.n_rows, 1))
        own = n_shared + np.arange(self.n_rows * n_own).reshape(self.n_rows, n_own)
        return np.hstack([shared, own]).astype(np.int32)

    def model_bytes(self, unit_tokens: int, *, shares: bool) -> int:
        """Returns the bytes of physical memory that K and V of all layers take."""
        n_units = int(self.tables(unit_tokens, shares=shares).max()) + 1
        return n_units * unit_tokens * KV_BYTES * N_LAYERS


SHARED = (SharedRows(64, 4096, 256), SharedRows(256, 4096, 256), SharedRows(256, 1000, 256))


@dataclass(frozen=True)
class Stored:
    """Rows as a scheme stores them."""

    layers: Sequence[tuple[Tensor, Tensor]]
    """K and V, [tokens, kv_heads, dim]."""
    tables: Ints
    """[rows, entries]: block tables for the kernel."""
    page_size: int
    line: Line
    """What storing took."""


def measure_sharing(rows: SharedRows, memory: VirtualMemory) -> Iterator[Line]:
    """Stores the same rows by each scheme. Yields memory, and times of a layer's attention in a decode step.

    ``radix, shared runs`` is ``radix`` with the engine's plan for pages that many rows share: they are read once.
    """
    k_rows, v_rows = (random_rows(rows) for _ in range(2))
    q = torch.randn(rows.n_rows, N_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
    out = torch.empty_like(q)
    run = SharedRun(tuple(range(rows.n_rows)), 0, rows.n_prefix // PAGE_SIZE)
    radix = in_pages(rows, shares=True)
    schemes: dict[str, tuple[Stored, Sequence[SharedRun]]] = {
        "paged": (in_pages(rows, shares=False), ()),
        "radix": (radix, ()),
        "radix, shared runs": (radix, (run,)),
        "vattention": (in_granules(rows, memory, shares=False), ()),
        "vattention-shared": (in_granules(rows, memory, shares=True), ()),
        "vattention-shared, all layers in a tensor": (
            in_granules(rows, memory, shares=True, n_layers=N_LAYERS),
            (),
        ),
    }
    calls: dict[str, Sequence[Callable[[], object]]] = {}
    lines: dict[str, Line] = {}
    for scheme, (stored, runs) in schemes.items():
        slots = slots_of(stored.tables, stored.page_size, rows.n_tokens)
        for k, v in stored.layers:
            k[slots], v[slots] = k_rows, v_rows
        attend, variant = decode(stored.tables, stored.page_size, [rows.n_tokens] * rows.n_rows, runs)
        errors = [relative_error(attend, q, k, v, k_rows[-1], v_rows[-1]) for k, v in stored.layers]
        calls[scheme] = [partial(attend, q, k, v, out) for k, v in stored.layers]
        lines[scheme] = {"variant": variant, **stored.line, "relative_error": round(max(errors), 5)}
    times = time_rounds(calls, N_CALLS)
    for scheme, line in lines.items():
        case = f"{rows.n_rows} x ({rows.n_prefix} + {rows.n_own})"
        ratios = [us / radix_us for us, radix_us in zip(times[scheme], times["radix"], strict=True)]
        yield {
            "case": case,
            "scheme": scheme,
            **spread("us", times[scheme]),
            **spread("ratio", ratios, 4),
            **line,
        }


def in_pages(rows: SharedRows, *, shares: bool) -> Stored:
    """Allocates pages in any order."""
    tables = rows.tables(PAGE_SIZE, shares=shares)
    n_pages = int(tables.max()) + 1
    free_bytes = free_memory()
    layers = [(random_tokens(n_pages * PAGE_SIZE), random_tokens(n_pages * PAGE_SIZE)) for _ in range(USED_LAYERS)]
    no_mapping = {"mappings_per_row": None, "mapping_ms_per_row": None}
    line = {**memory_line(rows, PAGE_SIZE, free_bytes, shares=shares), **no_mapping}
    order = np.random.default_rng(0).permutation(n_pages).astype(np.int32)
    return Stored(layers, order[tables], PAGE_SIZE, line)


def in_granules(rows: SharedRows, memory: VirtualMemory, *, shares: bool, n_layers: int = 1) -> Stored:
    """Reserves addresses for ``ROW_TOKENS`` of each row, and maps granules for the tokens that it has.

    The rows' addresses follow each other, so that a row is one page of ``ROW_TOKENS``. All of ``n_layers`` that are
    in one tensor have physical memory, and ``USED_LAYERS`` of them are read.
    """
    granule = memory.minimum_granule
    unit_tokens = granule_tokens(granule, n_layers)
    tables = rows.tables(unit_tokens, shares=shares)
    row_bytes = ROW_TOKENS // unit_tokens * granule
    device = torch.device("cuda", torch.cuda.current_device())
    n_tensors = 2 * max(USED_LAYERS // n_layers, 1)
    shape = (rows.n_rows * ROW_TOKENS, n_layers, N_KV_HEADS, HEAD_DIM)
    free_bytes, mapping_s = free_memory(), 0.0
    tensors = []
    for _ in range(n_tensors):
        first = memory.reserve(rows.n_rows * row_bytes)
        handles = [memory.create(granule) for _ in range(int(tables.max()) + 1)]
        begun = time.perf_counter()
        map_rows(memory, tables, first, row_bytes, handles)
        mapping_s += time.perf_counter() - begun
        tensors.append(tensor_at(first, shape, DTYPE, device))
    layers = [
        (k[:, layer], v[:, layer])
        for k, v in zip(tensors[::2], tensors[1::2], strict=True)
        for layer in range(min(n_layers, USED_LAYERS))
    ]
    n_tensors_of_model = N_TENSORS // n_layers
    line = {
        **memory_line(rows, unit_tokens, free_bytes, shares=shares, n_layers=n_tensors // 2 * n_layers),
        "mappings_per_row": tables.shape[1] * n_tensors_of_model,
        "mapping_ms_per_row": round(1e3 * mapping_s / (n_tensors * rows.n_rows) * n_tensors_of_model, 3),
    }
    return Stored(layers, np.arange(rows.n_rows, dtype=np.int32)[:, None], ROW_TOKENS, line)


def map_rows(memory: VirtualMemory, tables: Ints, first: int, row_bytes: int, handles: Sequence[Any]) -> None:
    """Maps the physical granules of each row one after the other, from the beginning of the row's addresses."""
    granule = memory.minimum_granule
    for row, units in enumerate(tables.tolist()):
        begin = first + row * row_bytes
        for index, unit in enumerate(units):
            memory.map(begin + index * granule, granule, handles[unit])
        memory.allow(begin, len(units) * granule)


def memory_line(
    rows: SharedRows, unit_tokens: int, free_before: int, *, shares: bool, n_layers: int = USED_LAYERS
) -> Line:
    """Returns the physical memory of all layers, counted, and that of the stored layers, as the driver says."""
    return {
        "unit_tokens": unit_tokens,
        "shared_tokens": rows.n_prefix // unit_tokens * unit_tokens if shares else 0,
        "model_gib": round(rows.model_bytes(unit_tokens, shares=shares) / 2**30, 3),
        "stored_gib": round((free_before - free_memory()) / 2**30, 3),
        "stored_layers": n_layers,
    }


def random_rows(rows: SharedRows) -> Tensor:
    """Returns [rows, tokens, kv_heads, dim] with a common prefix."""
    prefix = random_tokens(1, rows.n_prefix).expand(rows.n_rows, -1, -1, -1)
    return torch.cat([prefix, random_tokens(rows.n_rows, rows.n_own)], 1)


def free_memory() -> int:
    """Returns the bytes of the GPU that no process has, and that torch does not keep for later."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    return int(free_bytes)
