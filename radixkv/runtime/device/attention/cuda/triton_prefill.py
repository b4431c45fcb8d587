"""Prompt attention by the Triton kernel, which needs neither FlashInfer nor CUDA's compiler."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from radixkv.runtime.device.attention.cuda.base import AttentionShape
from radixkv.runtime.device.attention.cuda.prefill import PrefillBatch, PrefillLaunches, causal_tiles
from radixkv.runtime.device.attention.cuda.prefill_kernel import PrefillTile, attend_prompts
from radixkv.runtime.device.memory.cuda.array_copies import to_device

_MIN_LARGE_SHARED_BYTES = 200_000
"""Shared memory per multiprocessor from which more keys of size 256 fit: they take up to 164,896 bytes."""


_MIN_LARGE_SHARED_BYTES_OF_512 = 160_000
"""Shared memory per multiprocessor from which more pairs with heads of 512 fit: they take up to 197,152 bytes with
the products of Hopper and Blackwell, whose queries are in it, and 135,168 with those of Ampere."""


def choose_prefill_tile(head_dim: int, shared_bytes: int, *, has_8_bits: bool = False) -> PrefillTile:
    """Returns a tile that fits the GPU's registers and shared memory. Other tiles were not timed.

    With heads of 512, 64 pairs have sums of 128 KiB, half of a multiprocessor's registers: 128 of the 255 of each
    thread. In shared memory are their queries (64 KiB) and two stages of K and V of 32 positions (32 KiB each). The
    head is not split: for Hopper 184 bytes of each thread spill to memory, and none with 32 pairs. GPUs with 99 KiB
    a thread block take 32 pairs, and so do all with K and V of 8 bits, whose conversion needs registers, too.

    Args:
        head_dim: of K and V.
        shared_bytes: shared memory of a multiprocessor.
        has_8_bits: whether K and V have 8 bits.
    """
    if head_dim <= 128:
        return PrefillTile(128, 64, n_stages=3, n_warps=8)
    if head_dim > 256:
        is_large = shared_bytes >= _MIN_LARGE_SHARED_BYTES_OF_512 and not has_8_bits
        return PrefillTile(64 if is_large else 32, 32, n_stages=2, n_warps=8)
    return PrefillTile(64, 64 if shared_bytes >= _MIN_LARGE_SHARED_BYTES else 32, n_stages=2, n_warps=8)


class TritonPrefill:
    """Prompt attention of one model on one GPU by ``attend_prompts``; see ``PrefillAttention``.

    Triton compiles one kernel for each distinct window when it first runs, which takes seconds. Planning needs no
    memory but the items, 16 bytes for each tile of tokens.

    Args:
        shape: heads, page size and dtypes.
        windows: by layer, how many positions a token attends to, its own included; None for all.
        device: the GPU.
        shared_bytes: shared memory of a multiprocessor.
    """

    def __init__(
        self, shape: AttentionShape, windows: Sequence[int | None], *, device: torch.device, shared_bytes: int
    ) -> None:
        self._shape = shape
        self._windows = frozenset(windows)
        self._device = device
        self._tile = choose_prefill_tile(shape.head_dim, shared_bytes, has_8_bits=shape.kv_dtype != shape.dtype)

    def connect(self, tables: Tensor) -> None:
        """Binds the block tables."""
        self._tables = tables

    def plan(self, rows: PrefillBatch) -> PrefillLaunches:
        """Splits the rows into tiles, and sends them on the current stream without waiting."""
        items = causal_tiles(rows, self._tile.n_pairs // self._shape.group)
        columns = (items.first_queries, items.n_queries, items.first_entries, items.ends)
        sent = to_device(np.stack(columns, axis=1), self._device)
        launch = partial(attend_prompts, tables=self._tables, items=sent, scale=self._shape.scale, tile=self._tile)
        return {window: partial(launch, window=window) for window in self._windows}
