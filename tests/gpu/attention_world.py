"""A KV pool and block tables for GPU tests of attention, with an oracle in float32 torch, one row at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.runtime.device.attention.cuda.decode_tiles import Variant
from radixkv.runtime.device.attention.cuda.flashinfer import AttentionShape
from radixkv.runtime.device.attention.cuda.paged import PagedAttention
from radixkv.runtime.device.attention.cuda.run_selection import SharedKernel, SharingCosts
from radixkv.runtime.device.staging_cuda import Staging, StagingLayout
from radixkv.runtime.step.plan import SharedRun

Ints = NDArray[np.int32]


class World:
    """Attention over a pool with one layer per window.

    Pages that belong to no row hold NaN, as do positions after a row's last token.
    """

    def __init__(
        self,
        shape: AttentionShape,
        windows: Sequence[int | None] = (None,),
        *,
        max_rows: int = 64,
        width: int = 64,
        n_pages: int = 4096,
        seed: int = 0,
        prompt_kernel: Literal["fa2", "fa3"] | None = None,
        shared_kernel: SharedKernel | None = None,
        costs: SharingCosts | None = None,
    ) -> None:
        self.shape = shape
        self.windows = windows
        self.max_rows = max_rows
        self.device = torch.device("cuda")
        self.random = np.random.default_rng(seed)
        torch.manual_seed(seed)
        pool = (n_pages + 1, shape.page_size, shape.n_kv_heads, shape.head_dim)
        self.k = torch.full(pool, math.nan, dtype=shape.dtype, device="cuda")
        self.v = torch.full(pool, math.nan, dtype=shape.dtype, device="cuda")
        self.k[n_pages] = 0
        self.v[n_pages] = 0
        self.tables = torch.full((max_rows + 1, width), n_pages, dtype=torch.int32, device="cuda")
        self.free = self.random.permutation(n_pages).astype(np.int32).tolist()
        layout = StagingLayout()
        self.attention = PagedAttention(
            shape,
            windows,
            max_rows=max_rows,
            layout=layout,
            device=self.device,
            prompt_kernel=prompt_kernel,
            shared_kernel=shared_kernel,
            costs=costs,
        )
        self.staging = Staging(layout, self.device)
        self.attention.connect(self.staging, self.tables)

    def fill(self, batch_slot: int, length: int, shared: Sequence[int] = ()) -> list[int]:
        """Gives a slot pages for ``length`` positions, the first of them ``shared``, and writes random K and V."""
        size = self.shape.page_size
        pages = list(shared)
        while len(pages) * size < length:
            pages.append(self.free.pop())
        own = torch.tensor(pages[len(shared) :], dtype=torch.int64, device="cuda")
        for cache in (self.k, self.v):
            cache[own] = torch.randn(len(own), *cache.shape[1:], device="cuda").to(cache.dtype)
            if length % size and len(own):
                cache[own[-1], length % size :] = math.nan
        self.tables[batch_slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32, device="cuda")
        return pages

    def queries(self, n: int) -> Tensor:
        """Returns [n, heads, head_dim], random."""
        return torch.randn(n, self.shape.n_heads, self.shape.head_dim, device="cuda").to(self.shape.dtype)

    def decode(
        self,
        batch_slots: Ints,
        lengths: Ints,
        q: Tensor,
        shared: Sequence[SharedRun] = (),
        *,
        layer: int = 0,
        variant: Variant | None = None,
    ) -> Tensor:
        """Computes decode rows without a graph."""
        staged = self.staging.stage()
        step = self.attention.plan_decode(staged, batch_slots, lengths, shared, variant=variant)
        self.staging.send(staged)
        out = torch.full_like(q, math.nan)
        self.attention.step(step, None).run(layer, q, self.k, self.v, out)
        return out

    def expected(self, batch_slots: Ints, lengths: Ints, n_tokens: Ints, q: Tensor, *, layer: int = 0) -> Tensor:
        """Computes the oracle for rows of the last ``n_tokens`` positions of ``lengths``."""
        outs, first = [], 0
        window, group = self.windows[layer], self.shape.group
        for batch_slot, length, n in zip(batch_slots.tolist(), lengths.tolist(), n_tokens.tolist(), strict=True):
            pages = self.tables[batch_slot, : -(-length // self.shape.page_size)].long()
            k, v = (cache[pages].flatten(0, 1)[:length].float() for cache in (self.k, self.v))
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            rows = q[first : first + n].float()
            scores = torch.einsum("qhd,khd->hqk", rows, k) * self.shape.scale
            position = torch.arange(length - n, length, device="cuda")[:, None]
            key = torch.arange(length, device="cuda")[None, :]
            seen = key <= position
            if window is not None:
                seen &= key > position - window
            scores.masked_fill_(~seen, -math.inf)
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
            first += n
        return torch.cat(outs)


def assert_close(out: Tensor, expected: Tensor) -> None:
    """Compares up to the rounding of bfloat16, including that of partial results."""
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=1e-2)


def ints(values: Sequence[int]) -> Ints:
    """Returns an int32 array."""
    return np.array(values, dtype=np.int32)
