"""Prompts by the Triton kernel, planned as for a step, against the definition of attention in float64."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernel_support import DEVICE, among_layers, check_close, normal, on_device_only, on_kernels, poisoned
from torch import Tensor

from radixkv.runtime.device.attention.cuda.base import AttentionShape, DecodeRows, LayerTensors
from radixkv.runtime.device.attention.cuda.decode_tiles import Variant
from radixkv.runtime.device.attention.cuda.paged import PagedAttention
from radixkv.runtime.device.attention.cuda.prefill import PrefillBatch
from radixkv.runtime.device.attention.cuda.triton_prefill import TritonPrefill
from radixkv.runtime.device.kv_dtype import FP8, UNSCALED, LayerScales, quantize
from radixkv.runtime.device.memory.cuda.staging import Staging, StagingBuffer, StagingLayout

pytestmark = on_kernels

SHARED_BYTES = 102_400
"""Of a small GPU, whose tiles are the smallest."""
ROWS = ((0, 1), (0, 70), (5, 40), (37, 1), (90, 33), (62, 3))
"""Start and number of tokens of each row: whole prompts, chunks that start in mid page, and single tokens."""


class World:
    """Prompt rows over a pool of scattered pages. What belongs to no row is NaN."""

    def __init__(
        self,
        shape: AttentionShape,
        windows: Sequence[int | None],
        rows: Sequence[tuple[int, int]] = ROWS,
        *,
        shared_bytes: int = SHARED_BYTES,
    ) -> None:
        self.shape, self.windows, self.rows = shape, windows, rows
        self.scales = LayerScales(0.25, 2.0) if shape.kv_dtype == FP8 else UNSCALED
        size = shape.page_size
        lengths = [start + n for start, n in rows]
        width = -(-max(lengths) // size)
        n_pages = sum(-(-length // size) for length in lengths)
        pages = iter(torch.randperm(n_pages).tolist())
        tables = torch.full((len(rows) + 1, width), n_pages, dtype=torch.int32)
        pools = [
            torch.full((n_pages + 1, size, shape.n_kv_heads, shape.head_dim), math.nan, device=DEVICE)
            for _ in range(2)
        ]
        self.slots = torch.randperm(len(rows)).tolist()
        for slot, length in zip(self.slots, lengths, strict=True):
            count = -(-length // size)
            tables[slot, :count] = torch.tensor([next(pages) for _ in range(count)])
            position = torch.arange(length, device=DEVICE)
            where = tables[slot].to(DEVICE).long()[position // size], position % size
            for pool in pools:
                pool[where] = torch.randn(length, *pool.shape[2:], device=DEVICE)
        self.k, self.v = (
            quantize(pool, scale) if shape.kv_dtype == FP8 else pool.to(shape.kv_dtype)
            for pool, scale in zip(pools, self.scales, strict=True)
        )
        self.tables = tables.to(DEVICE)
        self.q = normal(sum(n for _, n in rows), shape.n_heads, shape.head_dim, dtype=shape.dtype)
        self.prompts = TritonPrefill(shape, windows, device=self.tables.device, shared_bytes=shared_bytes)
        self.prompts.connect(self.tables)

    def attended(self, window: int | None, sinks: Tensor | None = None) -> Tensor:
        """Plans the rows, and runs a layer."""
        starts, n_tokens = (np.array(column, np.int32) for column in zip(*self.rows, strict=True))
        slots, width = np.array(self.slots, np.int32), self.tables.shape[1]
        rows = PrefillBatch.of(slots, starts, n_tokens, self.windows, width, self.shape.page_size)
        out = poisoned(*self.q.shape, dtype=self.shape.dtype)
        in_log2 = None if sinks is None else sinks * math.log2(math.e)
        self.prompts.plan(rows)[window](LayerTensors(self.q, self.k, self.v, out, self.scales, in_log2))
        return out

    def expected(self, window: int | None, sinks: Tensor | None = None) -> Tensor:
        """Computes all rows in float64 by the definition."""
        outs, first, group = [], 0, self.shape.group
        for slot, (start, n) in zip(self.slots, self.rows, strict=True):
            pages = self.tables[slot].long()
            k, v = (
                (cache.float()[pages].double() * scale).flatten(0, 1)[: start + n].repeat_interleave(group, 1)
                for cache, scale in zip((self.k, self.v), self.scales, strict=True)
            )
            scores = torch.einsum("qhd,khd->hqk", self.q[first : first + n].double(), k) * self.shape.scale
            position = torch.arange(start, start + n, device=DEVICE)[:, None]
            key = torch.arange(start + n, device=DEVICE)[None, :]
            is_seen = key <= position
            if window is not None:
                is_seen &= key > position - window
            scores.masked_fill_(~is_seen, -math.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, n, 1)], -1)
            weights = scores.softmax(-1)[..., : start + n]
            outs.append(torch.einsum("hqk,khd->qhd", weights, v))
            first += n
        return torch.cat(outs)

    def poison_behind(self, window: int) -> None:
        """Fills the pages behind the window of each row's first token with NaN, as if other requests had them."""
        nan = torch.full(self.k.shape[1:], math.nan, device=DEVICE).to(self.k.dtype).view(torch.uint8)
        for slot, (start, _) in zip(self.slots, self.rows, strict=True):
            n_behind = max(start + 1 - window, 0) // self.shape.page_size
            for cache in (self.k, self.v):
                cache.view(torch.uint8)[self.tables[slot, :n_behind].long()] = nan


def shape_of(
    n_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    *,
    dtype: torch.dtype = torch.float16,
    has_8_bits: bool = False,
    scale: float | None = None,
) -> AttentionShape:
    """In float16 by default, because the interpreter multiplies no bfloat16."""
    if has_8_bits and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU cannot convert 8-bit floats")
    return AttentionShape(
        n_kv_heads * group,
        n_kv_heads,
        head_dim,
        page_size,
        dtype,
        head_dim**-0.5 if scale is None else scale,
        FP8 if has_8_bits else dtype,
    )


@pytest.mark.parametrize("has_8_bits", [False, True])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_ragged_rows(head_dim: int, page_size: int, window: int | None, has_8_bits: bool) -> None:
    world = World(shape_of(1, 3, head_dim, page_size, has_8_bits=has_8_bits), [window])
    check_close(world.attended(window), world.expected(window), n_roundings=2, slack=1.0)


@pytest.mark.parametrize("window", [1, 20, 64, 1000])
def test_short_and_long_windows(window: int) -> None:
    """Tiles of 128 tokens, whose last ones see none of the keys that the first ones see."""
    world = World(shape_of(1, 1), [window], [(0, 140), (30, 100)])
    check_close(world.attended(window), world.expected(window), n_roundings=2, slack=1.0)


@pytest.mark.parametrize("has_8_bits", [False, True])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize(("n_kv_heads", "group"), [(3, 1), (1, 5), (1, 7), (2, 8), (1, 64)])
def test_heads_that_share_a_kv_head(n_kv_heads: int, group: int, window: int | None, has_8_bits: bool) -> None:
    world = World(shape_of(n_kv_heads, group, has_8_bits=has_8_bits), [window])
    check_close(world.attended(window), world.expected(window), n_roundings=2, slack=1.0)


@pytest.mark.parametrize("has_8_bits", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_behind_the_longest_window_are_not_read(page_size: int, has_8_bits: bool) -> None:
    windows = [20, 40]
    world = World(shape_of(page_size=page_size, has_8_bits=has_8_bits), windows)
    expected = [world.expected(window) for window in windows]
    world.poison_behind(max(windows))
    for window, values in zip(windows, expected, strict=True):
        check_close(world.attended(window), values, n_roundings=2, slack=1.0)


@pytest.mark.parametrize("has_8_bits", [False, True])
@pytest.mark.parametrize("window", [None, 30])
def test_sinks(window: int | None, has_8_bits: bool) -> None:
    shape = shape_of(2, 8, has_8_bits=has_8_bits)
    world, sinks = World(shape, [window]), normal(shape.n_heads, dtype=torch.float32, scale=2.0) + 2.0
    check_close(world.attended(window, sinks), world.expected(window, sinks), n_roundings=2, slack=1.0)


@pytest.mark.parametrize("has_8_bits", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_tokens_that_have_other_layers_between_them(page_size: int, has_8_bits: bool) -> None:
    """K, or V, of all layers in one tensor, as vAttention can lay them out: a token's next one is a stride away."""
    world = World(shape_of(page_size=page_size, has_8_bits=has_8_bits), [None])
    expected = world.expected(None)
    world.k, world.v = among_layers(world.k), among_layers(world.v)
    check_close(world.attended(None), expected, n_roundings=2, slack=1.0)


def test_another_scale() -> None:
    world = World(shape_of(scale=0.5), [None])
    check_close(world.attended(None), world.expected(None), n_roundings=2, slack=1.0)


@pytest.mark.parametrize("shared_bytes", [102_400, 233_472])
@pytest.mark.parametrize("head_dim", [256, 512])
def test_tiles_of_small_and_large_gpus(head_dim: int, shared_bytes: int) -> None:
    world = World(shape_of(1, 2, head_dim), [None], [(70, 40), (0, 60)], shared_bytes=shared_bytes)
    check_close(world.attended(None), world.expected(None), n_roundings=2, slack=1.0)


def test_a_row_has_the_same_bits_beside_other_rows() -> None:
    world = World(shape_of(), [None])
    together, q, slots = world.attended(None), world.q, world.slots
    firsts = np.cumsum([0, *(n for _, n in ROWS)]).tolist()
    for row, first, end, slot in zip(ROWS, firsts, firsts[1:], slots, strict=False):
        world.rows, world.q, world.slots = [row], q[first:end], [slot]
        assert torch.equal(world.attended(None), together[first:end])


@pytest.mark.parametrize("variant", ["whole", "split"])
@pytest.mark.parametrize("has_8_bits", [False, True])
def test_a_mixed_step_of_a_machine_without_flashinfer(
    has_8_bits: bool, variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two decode rows and two prompt rows, over a layer with and one without a window and sinks."""
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    if DEVICE == "cpu":
        gpu = SimpleNamespace(
            major=8, minor=9, multi_processor_count=4, shared_memory_per_multiprocessor=SHARED_BYTES
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    windows, rows, n_decode = [None, 30], [(99, 1), (69, 1), (5, 40), (0, 20)], 2
    shape = shape_of(2, 4, has_8_bits=has_8_bits)
    world, layout = World(shape, windows, rows), StagingLayout()
    sinks = [None, normal(shape.n_heads, dtype=torch.float32) + 2.0]
    attention = PagedAttention(
        shape,
        windows,
        max_rows=len(rows),
        layout=layout,
        device=world.tables.device,
        kv_scales=[world.scales] * len(windows),
        sinks=sinks,
        prefill_kernel="triton",
    )
    staging, staged = Staging(layout, world.tables.device), StagingBuffer(torch.zeros(layout.size).int())
    attention.connect(staging, world.tables)
    slots, starts, n_tokens = (np.array(column, np.int32) for column in (world.slots, *zip(*rows, strict=True)))
    decode = attention.plan_decode(staged, DecodeRows(slots[:n_decode], starts[:n_decode] + 1), variant=variant)
    staging.send(staged)
    step = attention.step(decode, attention.plan_prompts(slots[n_decode:], starts[n_decode:], n_tokens[n_decode:]))
    for layer, window in enumerate(windows):
        out = poisoned(*world.q.shape, dtype=shape.dtype)
        step.run(layer, world.q, world.k, world.v, out)
        check_close(out, world.expected(window, sinks[layer]), n_roundings=3, slack=1.0)


def test_values_that_are_not_finite_stay_so_for_the_tokens_that_see_them() -> None:
    world = World(shape_of(n_kv_heads=1), [None], [(0, 40)])
    world.q[7] = math.nan
    assert not world.attended(None)[7].isfinite().any()
    world.k[world.tables[world.slots[0], 1].long(), 4] = math.inf  # position 20
    out = world.attended(None)
    assert not out[20:].isfinite().any()
    assert out[:7].isfinite().all()


@on_device_only
@pytest.mark.parametrize("has_8_bits", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_bfloat16(head_dim: int, has_8_bits: bool) -> None:
    world = World(shape_of(head_dim=head_dim, dtype=torch.bfloat16, has_8_bits=has_8_bits), [None, 30])
    for window in world.windows:
        check_close(world.attended(window), world.expected(window), n_roundings=3, slack=1.0)
