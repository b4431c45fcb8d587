"""A KV pool and block tables for GPU tests of attention, with an oracle in float32 torch, one row at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.runtime.device.attention.cuda.base import AttentionShape, DecodeRows
from radixkv.runtime.device.attention.cuda.decode_tiles import Variant
from radixkv.runtime.device.attention.cuda.flashinfer_modules import backend_of
from radixkv.runtime.device.attention.cuda.paged import PagedAttention, PrefillKernel
from radixkv.runtime.device.attention.cuda.run_selection import SharedKernel, SharingCosts
from radixkv.runtime.device.kv_dtype import FP8, UNSCALED, LayerScales, quantize
from radixkv.runtime.device.memory.cuda.staging import Staging, StagingLayout
from radixkv.runtime.step.plan import SharedRun

Ints = NDArray[np.int32]
FP8_SCALES = LayerScales(0.25, 3.0)
"""Scales of K and V of 8 bits in these tests."""


class World:
    """Attention over a pool with one layer per window.

    Pages that belong to no row hold NaN, as do positions after a row's last token. K and V of 8 bits have
    ``FP8_SCALES``.

    Args:
        has_sinks: whether all layers have attention sinks.
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
        prefill_kernel: PrefillKernel | None = None,
        shared_kernel: SharedKernel | None = None,
        costs: SharingCosts | None = None,
        has_sinks: bool = False,
    ) -> None:
        self.shape = shape
        self.windows = windows
        self.max_rows = max_rows
        self.device = torch.device("cuda")
        self.random = np.random.default_rng(seed)
        torch.manual_seed(seed)
        pool = (n_pages + 1, shape.page_size, shape.n_kv_heads, shape.head_dim)
        self.scales = FP8_SCALES if shape.kv_dtype == FP8 else UNSCALED
        kernel = prefill_kernel or backend_of(torch.cuda.get_device_capability())
        self.prompts_round = kernel == "fa3" and shape.kv_dtype == FP8
        """Whether prompts' queries and softmax weights are rounded to 8 bits."""
        self.k, self.v = (torch.full(pool, math.nan, dtype=shape.dtype, device="cuda") for _ in range(2))
        for cache in (self.k, self.v):
            cache[n_pages] = 0
        if shape.kv_dtype == FP8:
            self.k, self.v = self.k.to(FP8), self.v.to(FP8)
        self.tables = torch.full((max_rows + 1, width), n_pages, dtype=torch.int32, device="cuda")
        self.free = self.random.permutation(n_pages).astype(np.int32).tolist()
        self.sinks = [2 + 2 * torch.randn(shape.n_heads, device="cuda") if has_sinks else None for _ in windows]
        layout = StagingLayout()
        self.attention = PagedAttention(
            shape,
            windows,
            max_rows=max_rows,
            layout=layout,
            device=self.device,
            kv_scales=[self.scales] * len(windows),
            sinks=self.sinks,
            prefill_kernel=prefill_kernel,
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
        for cache, scale in zip((self.k, self.v), self.scales, strict=True):
            values = torch.randn(len(own), *cache.shape[1:], device="cuda")
            if length % size and len(own):
                values[-1, length % size :] = math.nan
            if cache.dtype == FP8:  # as bytes: torch assigns no 8-bit floats by index
                cache.view(torch.uint8)[own] = quantize(values, scale).view(torch.uint8)
            else:
                cache[own] = values.to(cache.dtype)
        self.tables[batch_slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32, device="cuda")
        return pages

    def poison(self, batch_slot: int, n_pages: int) -> None:
        """Fills the first pages of a slot with NaN, as if another request had them."""
        pages = self.tables[batch_slot, :n_pages].long()
        nan = torch.full((n_pages, *self.k.shape[1:]), math.nan, device="cuda").to(self.k.dtype)
        for cache in (self.k, self.v):
            cache.view(torch.uint8)[pages] = nan.view(torch.uint8)

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
        counts: Ints | None = None,
    ) -> Tensor:
        """Computes decode rows without a graph."""
        staged = self.staging.stage()
        rows = DecodeRows(batch_slots, lengths, shared, counts=counts)
        step = self.attention.plan_decode(staged, rows, variant=variant)
        self.staging.send(staged)
        out = torch.full_like(q, math.nan)
        self.attention.step(step, None).run(layer, q, self.k, self.v, out)
        return out

    def as_read(self, q: Tensor, n_decode: int = 0) -> Tensor:
        """Returns the queries of decode rows and then of prompts, as their kernels read them."""
        prompts = q[n_decode:].to(FP8) if self.prompts_round else q[n_decode:]
        return torch.cat([q[:n_decode].float(), prompts.float()])

    def assert_close(self, out: Tensor, expected: Tensor, n_decode: int = 0) -> None:
        """Compares decode rows and then prompts, up to the rounding of their kernels."""
        assert_close(out[:n_decode], expected[:n_decode])
        (assert_close_in_8_bits if self.prompts_round else assert_close)(out[n_decode:], expected[n_decode:])

    def expected(self, batch_slots: Ints, lengths: Ints, n_tokens: Ints, q: Tensor, *, layer: int = 0) -> Tensor:
        """Computes the oracle for rows of the last ``n_tokens`` positions of ``lengths``, over stored K and V."""
        outs, first = [], 0
        window, group, sinks = self.windows[layer], self.shape.group, self.sinks[layer]
        for batch_slot, length, n in zip(batch_slots.tolist(), lengths.tolist(), n_tokens.tolist(), strict=True):
            pages = self.tables[batch_slot, : -(-length // self.shape.page_size)].long()
            k, v = (
                cache.view(torch.uint8)[pages].view(cache.dtype).flatten(0, 1)[:length].float() * scale
                for cache, scale in zip((self.k, self.v), self.scales, strict=True)
            )
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            rows = q[first : first + n].float()
            scores = torch.einsum("qhd,khd->hqk", rows, k) * self.shape.scale
            position = torch.arange(length - n, length, device="cuda")[:, None]
            key = torch.arange(length, device="cuda")[None, :]
            seen = key <= position
            if window is not None:
                seen &= key > position - window
            scores.masked_fill_(~seen, -math.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks[:, None, None].expand(-1, n, 1)], -1)
            weights = scores.softmax(-1)[..., :length]
            outs.append(torch.einsum("hqk,khd->qhd", weights, v))
            first += n
        return torch.cat(outs)


def assert_close(out: Tensor, expected: Tensor) -> None:
    """Compares up to the rounding of bfloat16, including that of partial results."""
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=1e-2)


def assert_close_in_8_bits(out: Tensor, expected: Tensor) -> None:
    """Compares up to the rounding of softmax weights to 8 bits, of which each is off by a sixteenth at most.

    Errors of different positions cancel, more so the more there are.
    """
    error = (out.float() - expected).abs()
    assert error.max() <= expected.abs().max() / 16
    assert error.square().mean().sqrt() <= expected.square().mean().sqrt() / 25


def ints(values: Sequence[int]) -> Ints:
    """Returns an int32 array."""
    return np.array(values, dtype=np.int32)
