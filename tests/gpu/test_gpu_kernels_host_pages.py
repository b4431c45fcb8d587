"""Attention over host slots as they are: the kernels give the same bits as over the pool that the slots copy.

A slot has K of all layers before V, so that a layer's pages are as far apart as slots. On a GPU the slots are in
pinned memory, which the kernels read through its addresses; Triton's interpreter reads it as any other.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from kernel_support import DEVICE, integers, normal, on_kernels, poisoned
from torch import Tensor

from radixkv.runtime.device.attention.cuda.base import AttentionShape, LayerTensors
from radixkv.runtime.device.attention.cuda.decode_kernel import attend_decode
from radixkv.runtime.device.attention.cuda.decode_tiles import TileConfig
from radixkv.runtime.device.attention.cuda.merge import PartialResults, merge_results
from radixkv.runtime.device.attention.cuda.prefill import PrefillBatch
from radixkv.runtime.device.attention.cuda.triton_prefill import TritonPrefill
from radixkv.runtime.device.kv_dtype import UNSCALED
from radixkv.runtime.device.memory.page_shape import PageShape
from radixkv.runtime.device.ops.cuda.page_copies import gather_pages
from support.paths import ROOT

pytestmark = on_kernels

PAGE = PageShape(n_layers=3, n_kv_heads=2, page_size=16, head_dim=64, dtype=torch.float16)
"""In float16, because the interpreter multiplies no bfloat16."""
GROUP, N_SLOTS, N_PAGES, LENGTH, TILE = 4, 23, 19, 128, 32


class Prefix:
    """The same prefix in a pool and in host slots, in other orders. The copiers' kernel has written the slots."""

    def __init__(self, bench: Any) -> None:
        sizes = (PAGE.n_layers, N_PAGES, PAGE.page_size, PAGE.n_kv_heads, PAGE.head_dim)
        k, v = (normal(*sizes, dtype=PAGE.dtype) for _ in range(2))
        memory = torch.full((N_SLOTS, PAGE.n_bytes // 2), float("nan"), dtype=PAGE.dtype)
        memory = memory.pin_memory() if DEVICE == "cuda" else memory
        n_used = LENGTH // PAGE.page_size
        self.slots, self.pages = (torch.randperm(n)[:n_used].tolist() for n in (N_SLOTS, N_PAGES))
        words = [cache.view(torch.int64).flatten(2) for cache in (k, v)]
        for slot, page in zip(self.slots, self.pages, strict=True):
            block = torch.empty(PAGE.n_bytes // 8, dtype=torch.int64, device=DEVICE)
            gather_pages(*words, integers([page]), block)
            memory[slot] = block.view(PAGE.dtype).to(memory.device)
        self.host = bench.layers_of_slots(memory.flatten())
        self.pool = list(zip(k, v, strict=True))

    def both(self) -> list[tuple[Any, Tensor]]:
        """Returns the layers and the block table, in host slots and in the pool."""
        return [(self.host, integers([self.slots])), (self.pool, integers([self.pages]))]


@pytest.fixture
def prefix(monkeypatch: pytest.MonkeyPatch) -> Prefix:
    monkeypatch.syspath_prepend(ROOT / "bench")
    bench = importlib.import_module("unified_addressing")
    monkeypatch.setattr(bench, "PAGE", PAGE)
    return Prefix(bench)


def expected(prefix: Prefix, layer: int, q: Tensor) -> Tensor:
    """Attention of one query to all of the prefix, by the definition."""
    k, v = (values[prefix.pages].flatten(0, 1).float().repeat_interleave(GROUP, 1) for values in prefix.pool[layer])
    weights = (torch.einsum("hd,thd->ht", q.float(), k) * PAGE.head_dim**-0.5).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, v)


def test_a_step_over_host_slots(prefix: Prefix) -> None:
    n_heads = GROUP * PAGE.n_kv_heads
    q = normal(1, n_heads, PAGE.head_dim, dtype=PAGE.dtype)
    items = integers([[0, 0], [1, 1], [0, 0], [0, 64], [64, LENGTH], [0, 0], [0, 1]])
    for layer in range(PAGE.n_layers):
        outs = []
        for layers, table in prefix.both():
            out, values = (poisoned(2, n_heads, PAGE.head_dim, dtype=PAGE.dtype) for _ in range(2))
            lse = poisoned(2, n_heads, dtype=torch.float32)
            results = PartialResults(values, values, lse, (GROUP, 1))
            tensors = LayerTensors(q, *layers[layer], out[:1], UNSCALED, None)
            attend_decode(
                tensors,
                table,
                items,
                integers([0]),
                results,
                scale=PAGE.head_dim**-0.5,
                n_items=2,
                tile=16,
                tile_config=TileConfig(64, 3, 4, is_ahead=True, token_ns=1.0),
            )
            merge_results(tensors, results, integers([0, 2]), integers([0, 1]), integers([0]))
            outs.append(out[:1])
        assert torch.equal(*outs)
        torch.testing.assert_close(outs[0][0].float(), expected(prefix, layer, q[0]), rtol=0.02, atol=0.01)


def test_tiles_of_a_prompt_over_host_slots(prefix: Prefix) -> None:
    """Two tiles at the end of the same prefix, as the benchmark plans them: each last token sees all of it."""
    n_heads = GROUP * PAGE.n_kv_heads
    shape = AttentionShape(
        n_heads, PAGE.n_kv_heads, PAGE.head_dim, PAGE.page_size, PAGE.dtype, PAGE.head_dim**-0.5, PAGE.dtype
    )
    q = normal(2 * TILE, n_heads, PAGE.head_dim, dtype=PAGE.dtype)
    tile = np.full(2, TILE, np.int32)
    for layer in range(PAGE.n_layers):
        outs = []
        for layers, table in prefix.both():
            tables = torch.cat([table, table])
            prompts = TritonPrefill(shape, [None], device=tables.device, shared_bytes=102_400)
            prompts.connect(tables)
            rows = PrefillBatch.of(
                np.zeros(2, np.int32), LENGTH - tile, tile, [None], tables.shape[1], PAGE.page_size
            )
            out = poisoned(*q.shape, dtype=PAGE.dtype)
            prompts.plan(rows)[None](LayerTensors(q, *layers[layer], out, UNSCALED, None))
            outs.append(out)
        assert torch.equal(*outs)
        for last in (TILE - 1, 2 * TILE - 1):
            torch.testing.assert_close(
                outs[0][last].float(), expected(prefix, layer, q[last]), rtol=0.02, atol=0.01
            )
