"""Attention sinks against Transformers' attention of GPT-OSS: decode rows in all variants, and prompts."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from kernel_support import DEVICE, check_close, normal, on_device_only, on_kernels, poisoned
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from radixkv.runtime.device.attention.cuda.base import AttentionShape, DecodeRows, Geometry
from radixkv.runtime.device.attention.cuda.decode_kernel import attend_decode
from radixkv.runtime.device.attention.cuda.decode_plan import DecodePlanner
from radixkv.runtime.device.attention.cuda.decode_tiles import Variant
from radixkv.runtime.device.attention.cuda.flashinfer_prefill import FlashInferPrefillLaunch
from radixkv.runtime.device.attention.cuda.merge import PartialResults, merge_results
from radixkv.runtime.device.attention.cuda.paged import StepAttention
from radixkv.runtime.device.attention.cuda.prefill import PrefillBatch, PrefillLaunches
from radixkv.runtime.device.attention.cuda.run_selection import SharingCosts
from radixkv.runtime.device.attention.cuda.sinks import apply_sinks
from radixkv.runtime.device.attention.cuda.triton_prefill import TritonPrefill
from radixkv.runtime.device.attention.cuda.work_items import N_COLUMNS
from radixkv.runtime.device.kv_dtype import FP8, UNSCALED, LayerScales, quantize
from radixkv.runtime.device.memory.cuda.staging import StagingBuffer, StagingLayout
from radixkv.runtime.step.plan import SharedRun

pytestmark = on_kernels

PrefillKernel = Literal["flashinfer", "triton"]
KV_HEADS, GROUP, DIM, PAGE = 2, 8, 64, 16
HEADS = KV_HEADS * GROUP
SCALE = DIM**-0.5
WINDOWS = (None, 40, None)
N_PAGES, WIDTH = 40, 8
N_SHARED = 2
"""Leading pages that all rows share."""
LENGTHS = (100, 33, 70, 128)
N_PROMPT = 5
"""Tokens of the prompt row, which continue the last row's pages."""
START = LENGTHS[-1] - N_PROMPT


class World:
    """Three layers over one pool: with sinks, with sinks and a window, and without sinks.

    The last batch slot has a prompt row, and the others decode rows.
    """

    def __init__(self, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        self.shape = AttentionShape(HEADS, KV_HEADS, DIM, PAGE, dtype, SCALE, kv_dtype)
        self.scales = LayerScales(0.25, 2.0) if kv_dtype == FP8 else UNSCALED
        pools = [normal(N_PAGES, PAGE, KV_HEADS, DIM, dtype=dtype) for _ in range(2)]
        self.k, self.v = (
            quantize(pool, scale) if kv_dtype == FP8 else pool
            for pool, scale in zip(pools, self.scales, strict=True)
        )
        own = torch.randperm(N_PAGES - N_SHARED)[: len(LENGTHS) * (WIDTH - N_SHARED)].view(len(LENGTHS), -1)
        shared = torch.arange(N_SHARED).expand(len(LENGTHS), -1)
        self.tables = torch.cat([shared, own + N_SHARED], 1).int().to(DEVICE)
        self.sinks: list[Tensor | None] = [normal(HEADS, dtype=torch.float32, scale=2.0) + 3.0 for _ in range(2)]
        self.sinks.append(None)
        self.q = normal(len(LENGTHS) - 1 + N_PROMPT, HEADS, DIM, dtype=dtype)

    def keys_and_values(self, row: int, first: int, end: int) -> list[Tensor]:
        """Returns K and V of positions ``first`` to ``end``, each [1, kv_heads, positions, head_dim] in float32."""
        pages = self.tables[row].long()
        return [
            (cache[pages].float() * scale).flatten(0, 1)[first:end].transpose(0, 1)[None]
            for cache, scale in zip((self.k, self.v), self.scales, strict=True)
        ]

    def expected(self, layer: int) -> Tensor:
        """Computes all queries, one at a time."""
        sinks, window = self.sinks[layer], WINDOWS[layer]
        scores = torch.full([HEADS], -math.inf, device=DEVICE) if sinks is None else sinks
        module = SimpleNamespace(num_key_value_groups=GROUP, sinks=scores, training=False)
        queries = [(row, length) for row, length in enumerate(LENGTHS[:-1])]
        queries += [(len(LENGTHS) - 1, START + 1 + index) for index in range(N_PROMPT)]
        outs = []
        for query, (row, length) in zip(self.q, queries, strict=True):
            k, v = self.keys_and_values(row, 0 if window is None else max(length - window, 0), length)
            outs.append(eager_attention_forward(module, query.float()[None, :, None], k, v, None, SCALE)[0])
        return torch.cat(outs).view(-1, HEADS, DIM)

    def attention(self, variant: Variant, prefill_kernel: PrefillKernel) -> StepAttention:
        """Plans the step as ``PagedAttention`` does."""
        geometry = Geometry(self.shape, large_tile=0, n_processors=4, shared_bytes=100_000)
        layout = StagingLayout()
        planner = DecodePlanner(
            geometry,
            WINDOWS,
            max_rows=len(LENGTHS),
            layout=layout,
            costs=SharingCosts(launches_ns=-1e6, run_ns=-1e6),
            shared_kernel=None,
        )
        host = StagingBuffer(torch.zeros(layout.size, dtype=torch.int32))
        n_rows = len(LENGTHS) - 1
        slots, lengths = np.arange(n_rows, dtype=np.int32), np.array(LENGTHS[:-1], np.int32)
        runs = [SharedRun(tuple(range(n_rows)), 0, N_SHARED)] if variant == "shared" else []
        step = planner.plan(
            host, DecodeRows(slots, lengths, runs), WIDTH, variant=None if variant == "shared" else variant
        )
        assert step.variant == variant
        assert not step.n_large_items
        sent = host.buffer.to(DEVICE)
        results = PartialResults.allocate(planner.n_results, self.shape, sent.device)
        order, decode = sent[planner.order.first :][:n_rows], {}
        for window, fields in planner.fields.items():
            items = fields.items
            attend = partial(
                attend_decode,
                tables=self.tables,
                items=sent[items.field.first :][: items.field.size].view(N_COLUMNS, items.capacity),
                order=order,
                results=results,
                scale=SCALE,
                n_items=step.n_items,
                tile=step.tile,
                tile_config=step.tile_config,
            )
            merge = partial(
                merge_results,
                results=results,
                indptr=sent[fields.merge_indptr.first :][: n_rows + 1],
                indices=sent[fields.merge_indices.first :][: fields.merge_indices.size],
                order=order,
            )
            decode[window] = [attend] if variant == "whole" else [attend, merge]
        return StepAttention(
            WINDOWS,
            [self.scales] * len(WINDOWS),
            [None if sinks is None else sinks * math.log2(math.e) for sinks in self.sinks],
            n_rows,
            decode,
            self.triton_prompts() if prefill_kernel == "triton" else self.flashinfer_prompts(),
        )

    def triton_prompts(self) -> PrefillLaunches:
        """Plans the prompt row for the Triton kernel."""
        slots, starts, n_tokens = (np.array([n], np.int32) for n in (len(LENGTHS) - 1, START, N_PROMPT))
        prompts = TritonPrefill(self.shape, WINDOWS, device=self.tables.device, shared_bytes=102_400)
        prompts.connect(self.tables)
        return prompts.plan(PrefillBatch.of(slots, starts, n_tokens, WINDOWS, WIDTH, PAGE))

    def flashinfer_prompts(self) -> PrefillLaunches:
        """Returns launches of FlashInfer, whose kernel torch stands in for: it knows no sinks, and reports sums."""
        lse = poisoned(N_PROMPT, HEADS, dtype=torch.float32)

        def kernel(window: int | None) -> Any:
            def launch(q: Tensor, k: Tensor, v: Tensor, out: Tensor, scales: LayerScales) -> None:
                for index in range(N_PROMPT):
                    first, end = 0 if window is None else START + 1 + index - window, START + 1 + index
                    keys, values = self.keys_and_values(len(LENGTHS) - 1, max(first, 0), end)
                    heads = [part[0].repeat_interleave(GROUP, 0) for part in (keys, values)]
                    scores = torch.einsum("hd,htd->ht", q[index].float(), heads[0]) * SCALE
                    out[index] = torch.einsum("ht,htd->hd", scores.softmax(-1), heads[1])
                    lse[index] = scores.logsumexp(-1) / math.log(2)

            return launch

        return {window: FlashInferPrefillLaunch(kernel(window), False, lse) for window in set(WINDOWS)}


@pytest.mark.parametrize(
    ("variant", "prefill_kernel"),
    [("whole", "flashinfer"), ("whole", "triton"), ("split", "flashinfer"), ("shared", "triton")],
)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float16, torch.float16),
        (torch.float16, FP8),
        pytest.param(torch.bfloat16, torch.bfloat16, marks=on_device_only),
        pytest.param(torch.bfloat16, FP8, marks=on_device_only),
    ],
)
def test_a_mixed_step_is_that_of_transformers(
    dtype: torch.dtype, kv_dtype: torch.dtype, variant: Variant, prefill_kernel: PrefillKernel
) -> None:
    """In float16 without a GPU, because the interpreter multiplies no bfloat16."""
    if kv_dtype == FP8 and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU cannot convert 8-bit floats")
    world = World(dtype, kv_dtype)
    attention = world.attention(variant, prefill_kernel)
    for layer in range(len(WINDOWS)):
        out = poisoned(*world.q.shape, dtype=dtype)
        attention.run(layer, world.q, world.k, world.v, out)
        check_close(out, world.expected(layer), n_roundings=3, slack=1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n_heads", "head_dim"), [(64, 64), (12, 64), (3, 128)])
def test_outputs_are_multiplied_by_their_share(n_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    out = normal(7, n_heads, head_dim, dtype=dtype)
    lse, sinks = (normal(*shape, dtype=torch.float32, scale=3.0) for shape in ((7, n_heads), (n_heads,)))
    share = torch.sigmoid((lse - sinks).double() * math.log(2))
    expected = out.double() * share[..., None]
    apply_sinks(out, lse, sinks)
    check_close(out, expected)


def test_sinks_far_from_all_scores_and_outputs_that_are_not_finite() -> None:
    """A sink far below does nothing, one far above leaves nothing, and NaN stays NaN."""
    before = normal(3, 4, DIM, dtype=torch.float32)
    before[2] = math.nan
    out, lse = before.clone(), normal(3, 4, dtype=torch.float32)
    lse[2, 0] = math.nan
    apply_sinks(out, lse, torch.tensor([-1e4, 1e4, -math.inf, 3e38], device=DEVICE))
    assert torch.equal(out[:2, [0, 2]], before[:2, [0, 2]])
    assert not out[:2, [1, 3]].any()
    assert out[2].isnan().all()
