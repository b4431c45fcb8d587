"""The float32 oracle of CUDA's attention, which runs on the CPU too, against the definition in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from radixkv.runtime.device.attention.base import LayerAttention
from radixkv.runtime.device.attention.cuda.base import AttentionPlanner, AttentionShape, DecodeRows
from radixkv.runtime.device.attention.cuda.work_items import Ints
from radixkv.runtime.device.memory.cuda.staging import Staging, StagingBuffer, StagingLayout
from support.cases import rest_nightly
from support.reference_attention import MAX_VALUES, ReferenceAttention

CPU = torch.device("cpu")
MAX_ROWS = 12
WIDTH = 200
NO_STAGING = StagingBuffer(torch.empty(0, dtype=torch.int32))

Row = tuple[int, int, int]
"""Batch slot, length including the step's tokens, and number of the step's tokens."""
DECODE: list[Row] = [(3, 1, 1), (0, 700, 1), (7, 16, 1), (5, 17, 1), (9, 333, 1)]
PROMPTS: list[Row] = [(1, 130, 130), (2, 300, 63), (4, 700, 2), (6, 1000, 200), (8, 5, 5)]


class World:
    """A pool with NaN at positions that no row has, and block tables with only the rows' pages."""

    def __init__(self, shape: AttentionShape, windows: Sequence[int | None], rows: Sequence[Row]) -> None:
        self.shape = shape
        self.windows = windows
        generator = torch.Generator().manual_seed(1)
        counts = [-(-length // shape.page_size) for _, length, _ in rows]
        free = torch.randperm(2 * sum(counts), generator=generator).tolist()
        self.k, self.v = torch.full((2, len(free) + 1, shape.page_size, shape.n_kv_heads, shape.head_dim), math.nan)
        self.tables = torch.full((MAX_ROWS + 1, max(WIDTH, *counts)), 1 << 30, dtype=torch.int32)
        for (batch_slot, length, _), n_pages in zip(rows, counts, strict=True):
            pages = [free.pop() for _ in range(n_pages)]
            self.tables[batch_slot, :n_pages] = torch.tensor(pages, dtype=torch.int32)
            for cache in (self.k, self.v):
                values = torch.randn(length, *cache.shape[2:], generator=generator)
                for index, page in enumerate(pages):
                    part = values[index * shape.page_size : (index + 1) * shape.page_size]
                    cache[page, : len(part)] = part
        # Large scores, so that few positions dominate and the result shows if one is missing.
        self.q = 4 * torch.randn(sum(n for _, _, n in rows), shape.n_heads, shape.head_dim, generator=generator)

    def connected(self, max_values: int = MAX_VALUES) -> AttentionPlanner[Ints, Ints]:
        attention = ReferenceAttention(self.shape, self.windows, device=CPU, max_values=max_values)
        attention.connect(Staging(StagingLayout(), CPU), self.tables)
        return attention

    def run(self, step: LayerAttention, layer: int, q: Tensor) -> Tensor:
        out = torch.full_like(q, math.nan)
        step.run(layer, q, self.k, self.v, out)
        return out

    def expected(self, rows: Sequence[Row], layer: int) -> Tensor:
        window, group = self.windows[layer], self.shape.group
        outs, queries = [], iter(self.q.double())
        for batch_slot, length, n in rows:
            for position in range(length - n, length):
                seen = range(0 if window is None else max(0, position - window + 1), position + 1)
                positions = torch.tensor(seen)
                pages = self.tables[batch_slot].long()[positions // self.shape.page_size]
                k, v = (cache[pages, positions % self.shape.page_size].double() for cache in (self.k, self.v))
                k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
                scores = torch.einsum("hd,khd->hk", next(queries), k) * self.shape.head_dim**-0.5
                outs.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v))
        return torch.stack(outs)


def columns(rows: Sequence[Row]) -> tuple[Ints, Ints, Ints]:
    batch_slots, lengths, n_tokens = np.array(rows, dtype=np.int32).T
    return batch_slots, lengths, n_tokens


def plan_step(
    attention: AttentionPlanner[Ints, Ints], decode: Sequence[Row], prompts: Sequence[Row]
) -> LayerAttention:
    decode_plan = prompt_plan = None
    if decode:
        batch_slots, lengths, _ = columns(decode)
        decode_plan = attention.plan_decode(NO_STAGING, DecodeRows(batch_slots, lengths))
    if prompts:
        batch_slots, lengths, n_tokens = columns(prompts)
        prompt_plan = attention.plan_prompts(batch_slots, lengths - n_tokens, n_tokens)
    return attention.step(decode_plan, prompt_plan)


def shape_of(n_heads: int = 6, n_kv_heads: int = 2, head_dim: int = 10, page_size: int = 16) -> AttentionShape:
    return AttentionShape(n_heads, n_kv_heads, head_dim, page_size, torch.float32, head_dim**-0.5, torch.float32)


def check(
    shape: AttentionShape, windows: Sequence[int | None], decode: Sequence[Row], prompts: Sequence[Row]
) -> None:
    rows = [*decode, *prompts]
    world = World(shape, windows, rows)
    step = plan_step(world.connected(), decode, prompts)
    for layer in range(len(windows)):
        torch.testing.assert_close(
            world.run(step, layer, world.q), world.expected(rows, layer).float(), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    "shape",
    [
        shape_of(),
        shape_of(n_heads=2, page_size=1),
        shape_of(n_heads=4, n_kv_heads=1, head_dim=64),
        shape_of(n_heads=3, n_kv_heads=3, head_dim=2, page_size=64),
        shape_of(n_heads=2, n_kv_heads=1, head_dim=8, page_size=512),
    ],
)
def test_ragged_rows_of_all_kinds(shape: AttentionShape) -> None:
    check(shape, [None], DECODE, PROMPTS)


@pytest.mark.parametrize("window", rest_nightly([1, 2, 16, 100, 256, 5000], kept=(0, 3)))
def test_windows_beside_layers_that_see_all(window: int) -> None:
    check(shape_of(), [window, None], DECODE, PROMPTS)


def test_pages_behind_all_windows_are_not_read() -> None:
    rows: list[Row] = [(0, 700, 1), (1, 300, 1), (2, 500, 90)]
    world = World(shape_of(), [40], rows)
    expected = world.expected(rows, 0).float()
    for batch_slot, length, n_tokens in rows:
        for position in range(length - n_tokens - 40 + 1):
            page = int(world.tables[batch_slot, position // 16])
            world.k[page, position % 16] = world.v[page, position % 16] = math.nan
    out = world.run(plan_step(world.connected(), rows[:2], rows[2:]), 0, world.q)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_decode_rows_alone() -> None:
    check(shape_of(), [None, 20], DECODE, [])


def test_prompts_alone() -> None:
    check(shape_of(), [None, 20], [], PROMPTS)


def test_rows_that_need_several_groups_of_tiles() -> None:
    shape = shape_of()
    expected = World(shape, [None], [*DECODE, *PROMPTS]).expected([*DECODE, *PROMPTS], 0).float()
    for max_values in (1, 1 << 14, 1 << 18):
        world = World(shape, [None], [*DECODE, *PROMPTS])
        out = world.run(plan_step(world.connected(max_values), DECODE, PROMPTS), 0, world.q)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_scores_of_any_size() -> None:
    world = World(shape_of(), [None], DECODE)
    step = plan_step(world.connected(), DECODE, [])
    out = world.run(step, 0, world.q * 1e4)
    world.q *= 1e4
    torch.testing.assert_close(out, world.expected(DECODE, 0).float(), rtol=1e-4, atol=1e-4)


def test_nan_and_inf_stay_in_their_row() -> None:
    rows: list[Row] = [(0, 40, 1), (1, 40, 1), (2, 90, 70)]
    world = World(shape_of(), [None], rows)
    world.q[0] = math.nan
    world.v[int(world.tables[2, 0]), 3] = math.inf
    out = world.run(plan_step(world.connected(), rows[:2], rows[2:]), 0, world.q)
    assert not out[0].isfinite().any()
    assert out[1].isfinite().all()
    assert not out[2:].isfinite().any()


def test_there_are_no_variants_to_capture() -> None:
    assert list(World(shape_of(), [None], DECODE).connected().variants(8)) == []
