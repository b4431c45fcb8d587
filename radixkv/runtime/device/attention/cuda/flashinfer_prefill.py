"""Prompt attention by FlashInfer's FA2 or FA3 kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from radixkv.runtime.device.attention.cuda.base import AttentionShape, LayerTensors
from radixkv.runtime.device.attention.cuda.fa3_prefill import Fa3Schedule, tile_queries
from radixkv.runtime.device.attention.cuda.flashinfer import (
    Fa2Kernel,
    Fa3Kernel,
    FlashInferLaunch,
    fa2_tile,
)
from radixkv.runtime.device.attention.cuda.flashinfer_modules import FlashInferKernel
from radixkv.runtime.device.attention.cuda.prefill import PrefillBatch, PrefillLaunches, causal_tiles
from radixkv.runtime.device.attention.cuda.sinks import apply_sinks
from radixkv.runtime.device.attention.cuda.work_items import Fa2Fields
from radixkv.runtime.device.kv_dtype import FP8
from radixkv.runtime.device.memory.cuda.array_copies import to_device
from radixkv.runtime.device.memory.cuda.staging import StagingBuffer, StagingLayout
from radixkv.runtime.device.ops.cuda.fp8 import round_to_fp8


class FlashInferPrefill:
    """Prompt attention of one model on one GPU by FlashInfer; see ``PrefillAttention``.

    Args:
        kernel: ``fa3`` on Hopper alone.
        shape: heads, page size and dtypes.
        windows: by layer, how many positions a token attends to, its own included; None for all.
        has_sinks: whether any layer has attention sinks.
        device: the GPU.
        n_processors: its multiprocessors.
    """

    def __init__(
        self,
        kernel: FlashInferKernel,
        shape: AttentionShape,
        windows: Sequence[int | None],
        *,
        has_sinks: bool,
        device: torch.device,
        n_processors: int,
    ) -> None:
        self._uses_fa3 = kernel == "fa3"
        self._shape = shape
        self._windows = frozenset(windows)
        self._has_sinks = has_sinks
        self._device = device
        self._n_processors = n_processors

    def connect(self, tables: Tensor) -> None:
        """Binds the block tables and loads the kernels. Compiling takes minutes where they are not prebuilt."""
        self._n_entries = tables.numel()
        if self._uses_fa3:
            self._fa3_kernels = {window: Fa3Kernel(self._shape, window, tables) for window in self._windows}
        else:
            self._fa2_kernels = {window: Fa2Kernel(self._shape, window, tables) for window in self._windows}

    def plan(self, rows: PrefillBatch) -> PrefillLaunches:
        """Plans the rows, and sends the plan on the current stream without waiting."""
        lse = None
        if self._has_sinks:
            n_tokens = int(rows.n_tokens.sum())
            lse = torch.empty(n_tokens, self._shape.n_heads, dtype=torch.float32, device=self._device)
        launches = self._fa3_launches(rows, lse) if self._uses_fa3 else self._fa2_launches(rows, lse)
        rounds_queries = self._uses_fa3 and self._shape.kv_dtype == FP8
        return {window: FlashInferPrefillLaunch(launch, rounds_queries, lse) for window, launch in launches.items()}

    def _fa3_launches(self, rows: PrefillBatch, lse: Tensor | None) -> Mapping[int | None, FlashInferLaunch]:
        schedule = Fa3Schedule.build(
            rows,
            n_heads=self._shape.n_heads,
            tile=tile_queries(self._shape.head_dim),
            n_processors=self._n_processors,
        )
        sent = to_device(schedule.values, self._device)
        return {window: kernel.launch(sent, schedule.plan, lse=lse) for window, kernel in self._fa3_kernels.items()}

    def _fa2_launches(self, rows: PrefillBatch, lse: Tensor | None) -> Mapping[int | None, FlashInferLaunch]:
        tile = fa2_tile(self._shape.head_dim)
        items = causal_tiles(rows, tile // self._shape.group)
        layout = StagingLayout()
        fields = Fa2Fields.allocate(len(items), layout)
        host = StagingBuffer(torch.empty(layout.size, dtype=torch.int32, pin_memory=True))
        fields.fill(
            host,
            items,
            items.first_queries,
            len(items),
            page_size=self._shape.page_size,
            n_entries=self._n_entries,
        )
        sent = host.buffer.to(self._device, non_blocking=True)
        return {
            window: kernel.launch(fields, sent, len(items), tile, is_causal=True, lse=lse)
            for window, kernel in self._fa2_kernels.items()
        }


@dataclass(frozen=True)
class FlashInferPrefillLaunch:
    """A planned call of FlashInfer's kernel; see ``PrefillLaunches``."""

    launch: FlashInferLaunch
    rounds_queries: bool
    """Whether queries are rounded to 8 bits first, as FA3 needs them over K and V of 8 bits."""
    lse: Tensor | None
    """[tokens, heads] float32: log2 of each token's sum of exponentials, overwritten by each layer; None if the
    model has no sinks."""

    def __call__(self, layer: LayerTensors) -> None:
        queries = layer.q
        if self.rounds_queries:
            queries = torch.empty_like(layer.q, dtype=FP8)
            round_to_fp8(layer.q, queries)
        self.launch(queries, layer.k_cache, layer.v_cache, layer.out, layer.scales)
        if layer.sinks is not None:
            assert self.lse is not None, "planned by attention of a model with sinks"
            apply_sinks(layer.out, self.lse, layer.sinks)
