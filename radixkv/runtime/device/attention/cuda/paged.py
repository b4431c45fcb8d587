"""Attention over the paged KV pool on the GPU: planned on the host, enqueued without waiting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from radixkv.runtime.device.attention.cuda.base import (
    AttentionShape,
    DecodeRows,
    Geometry,
    LayerLaunch,
    LayerTensors,
)
from radixkv.runtime.device.attention.cuda.decode_kernel import attend_decode
from radixkv.runtime.device.attention.cuda.decode_plan import DecodePlanner, DecodeStep
from radixkv.runtime.device.attention.cuda.decode_tiles import Variant
from radixkv.runtime.device.attention.cuda.fa3_prefill import tile_queries
from radixkv.runtime.device.attention.cuda.fa3_shared import Fa3Fields
from radixkv.runtime.device.attention.cuda.flashinfer import Fa2Kernel, Fa3Kernel, fa2_tile
from radixkv.runtime.device.attention.cuda.flashinfer_modules import backend_of
from radixkv.runtime.device.attention.cuda.flashinfer_prefill import FlashInferPrefill
from radixkv.runtime.device.attention.cuda.merge import PartialResults, merge_results
from radixkv.runtime.device.attention.cuda.prefill import PrefillAttention, PrefillBatch, PrefillLaunches
from radixkv.runtime.device.attention.cuda.run_selection import SharedKernel, SharingCosts
from radixkv.runtime.device.attention.cuda.shared_attention import attend_shared_by_fa2, attend_shared_by_fa3
from radixkv.runtime.device.attention.cuda.triton_prefill import TritonPrefill
from radixkv.runtime.device.attention.cuda.work_items import N_COLUMNS, Ints
from radixkv.runtime.device.kv_dtype import UNSCALED, LayerScales
from radixkv.runtime.device.memory.cuda.staging import Staging, StagingBuffer, StagingLayout

PrefillKernel = Literal["fa2", "fa3", "triton"]
"""The kernel of prompt rows: one of FlashInfer's, or our own in Triton."""


class PagedAttention:
    """Attention of one model on one GPU.

    Decode rows come first in a step. The kernels read the block tables on the device, so these must be up to date
    before a step's first layer; entries after a row's last page are never read. If all layers have windows, neither
    are the entries of pages that lie behind the longest window of a row's first token. This holds for the layers
    with windows alone where they have block tables of their own.

    Memory: partial results and copies of queries, about 115 MB at 1,024 rows of 32 heads of 128 in bfloat16.

    Args:
        shape: heads, page size and dtypes; of queries float16 or bfloat16.
        windows: by layer, how many positions a token attends to, its own included; None for all.
        max_rows: most rows of a step. Batch slots are below it; padding has this batch slot.
        layout: the staging fields are added to it.
        device: the GPU.
        costs: decide whether shared pages are read once for many rows; None for the measured ones.
        kv_scales: [layers], of K and V of 8 bits; None: all are 1.
        sinks: [layers] of [heads], a score of each head that takes part in the softmax and has no value; None for
            layers or models without.
        prefill_kernel: None for the kernel of FlashInfer that ``backend_of`` returns.
        shared_kernel: kernel for pages that many rows share; None for that of ``backend_of``, too. With the prompt
            kernel ``triton``, None is for no such kernel: FlashInfer is not imported, and the decode kernel reads
            these pages too.
    """

    def __init__(
        self,
        shape: AttentionShape,
        windows: Sequence[int | None],
        *,
        max_rows: int,
        layout: StagingLayout,
        device: torch.device,
        kv_scales: Sequence[LayerScales] | None = None,
        sinks: Sequence[Tensor | None] | None = None,
        costs: SharingCosts | None = None,
        prefill_kernel: PrefillKernel | None = None,
        shared_kernel: SharedKernel | None = None,
    ) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._shape = shape
        self._windows = tuple(windows)
        self._device = device
        self._kv_scales = kv_scales or [UNSCALED] * len(self._windows)
        self._sinks = [
            None if scores is None else scores.float() * math.log2(math.e)
            for scores in sinks or [None] * len(self._windows)
        ]
        backend = backend_of((properties.major, properties.minor))
        self._prefill_kernel: PrefillKernel = prefill_kernel or backend
        if prefill_kernel != "triton":
            shared_kernel = shared_kernel or backend
        self._geometry = Geometry(
            shape,
            _large_tile(shape, shared_kernel),
            properties.multi_processor_count,
            properties.shared_memory_per_multiprocessor,
        )
        self._max_rows = max_rows
        self._decode = DecodePlanner(
            self._geometry,
            windows,
            max_rows=max_rows,
            layout=layout,
            costs=costs or SharingCosts.for_kernel(shared_kernel),
            shared_kernel=shared_kernel,
        )

    def connect(self, staging: Staging, tables: Tensor, window_tables: Tensor | None = None) -> None:
        """Binds device memory and loads the kernels. Compiling takes minutes where they are not prebuilt.

        Args:
            staging: of the layout with all fields added.
            tables: [max_rows + 1, width] int32 block tables, at a fixed address.
            window_tables: see ``AttentionPlanner.connect``; of the shape of ``tables``.
        """
        shape = self._shape
        self._staging = staging
        self._tables = tables
        self._tables_of = {
            window: tables if window is None or window_tables is None else window_tables for window in self._windows
        }
        self._prompts: list[tuple[PrefillAttention, Sequence[int | None]]] = []
        kinds = [self._windows]
        if window_tables is not None:
            assert window_tables.shape == tables.shape, "both have an entry for the same positions"
            kinds = [(None,)] if None in self._windows else []
            if with_windows := tuple(window for window in self._windows if window is not None):
                kinds.append(with_windows)
        for windows in kinds:
            prefill = self._new_prefill(windows)
            prefill.connect(self._tables_of[windows[0]])
            self._prompts.append((prefill, windows))
        by_member = isinstance(self._decode.large_fields, Fa3Fields)
        if self._decode.large_fields is not None and None in self._windows:
            self._large_kernel = (Fa3Kernel if by_member else Fa2Kernel)(shape, None, tables)
        self._results = PartialResults.allocate(self._decode.n_results, shape, self._device, by_member=by_member)
        n_ordered_queries = 0
        if self._decode.large_fields is not None:
            n_ordered_queries = self._decode.n_large_results if by_member else self._max_rows
        self._ordered_queries = torch.zeros(
            n_ordered_queries,
            shape.n_heads,
            shape.head_dim,
            dtype=shape.kv_dtype if by_member else shape.dtype,
            device=self._device,
        )

    def variants(self, bucket: int) -> list[Variant]:
        """Returns the variants to capture for a bucket."""
        return self._decode.variants(bucket)

    def fits_prompts(self, starts: Ints, n_tokens: Ints) -> bool:
        """Whether prompt rows can be computed as decode rows, in about the time of prompts' kernels."""
        return self._decode.fits_prompts(starts, n_tokens)

    def plan_decode(
        self,
        staged: StagingBuffer,
        rows: DecodeRows,
        bucket: int | None = None,
        variant: Variant | None = None,
    ) -> DecodeStep:
        """Plans a step's decode rows, and stages the plan.

        Args:
            staged: the step's staging buffer.
            rows: the rows, without padding.
            bucket: rows of the graph that will run; None runs without a graph.
            variant: variant of the graph; None chooses the fastest.
        """
        return self._decode.plan(staged, rows, self._tables.shape[1], bucket, variant)

    def plan_prompts(self, batch_slots: Ints, starts: Ints, n_tokens: Ints) -> PrefillLaunches:
        """Plans the prompt rows, and sends the plan on the current stream.

        The tokens of consecutive rows are consecutive.

        Args:
            batch_slots: [rows].
            starts: [rows], position of each row's first token.
            n_tokens: [rows].
        """
        width, page_size = self._tables.shape[1], self._shape.page_size
        launches: dict[int | None, LayerLaunch] = {}
        for prefill, windows in self._prompts:
            launches |= prefill.plan(PrefillBatch.of(batch_slots, starts, n_tokens, windows, width, page_size))
        return launches

    def step(self, decode: DecodeStep | None, prompts: PrefillLaunches | None) -> StepAttention:
        """Returns attention of the planned step."""
        distinct = set(self._windows)
        return StepAttention(
            self._windows,
            self._kv_scales,
            self._sinks,
            0 if decode is None else decode.n_rows,
            {} if decode is None else {window: self._decode_launches(decode, window) for window in distinct},
            {} if prompts is None else prompts,
        )

    def _new_prefill(self, windows: Sequence[int | None]) -> PrefillAttention:
        """Returns attention of prompt rows for the layers with these windows."""
        properties = torch.cuda.get_device_properties(self._device)
        if self._prefill_kernel == "triton":
            return TritonPrefill(
                self._shape,
                windows,
                device=self._device,
                shared_bytes=properties.shared_memory_per_multiprocessor,
            )
        return FlashInferPrefill(
            self._prefill_kernel,
            self._shape,
            windows,
            has_sinks=any(scores is not None for scores in self._sinks),
            device=self._device,
            n_processors=properties.multi_processor_count,
        )

    def _decode_launches(self, step: DecodeStep, window: int | None) -> list[LayerLaunch]:
        fields, view = self._decode.fields[window], self._staging.view
        order = view(self._decode.order)[: step.n_rows]
        launches: list[LayerLaunch] = []
        if window is None and step.n_large_items > 0:
            launches.append(self._large_launch(step))
        attend = partial(
            attend_decode,
            tables=self._tables_of[window],
            items=view(fields.items.field).view(N_COLUMNS, fields.items.capacity),
            order=order,
            results=self._results,
            scale=self._shape.scale,
            n_items=step.n_items,
            tile=step.tile,
            tile_config=step.tile_config,
            has_limits=step.variant == "extend",
        )
        launches.append(attend)
        if step.variant != "whole":
            indptr, indices = view(fields.merge_indptr)[: step.n_rows + 1], view(fields.merge_indices)
            launches.append(
                partial(merge_results, results=self._results, indptr=indptr, indices=indices, order=order)
            )
        return launches

    def _large_launch(self, step: DecodeStep) -> LayerLaunch:
        fields, view, group = self._decode.large_fields, self._staging.view, self._shape.group
        order = view(self._decode.order)[: step.n_rows]
        if isinstance(fields, Fa3Fields):
            assert isinstance(self._large_kernel, Fa3Kernel)
            pairs = (len(self._ordered_queries) * group, self._shape.n_kv_heads)
            values, lse = (
                results[: len(self._ordered_queries)] for results in (self._results.values, self._results.lse)
            )
            launch = self._large_kernel.launch(
                view(fields.field), fields.plan, is_causal=False, lse=lse.view(pairs), is_merged=True
            )
            return partial(
                attend_shared_by_fa3,
                order=order,
                copies=view(fields.copies).view(3, fields.capacity),
                n_items=step.n_large_items,
                n_rows=self._geometry.large_rows,
                group=group,
                queries=self._ordered_queries,
                values=values.view(*pairs, self._shape.head_dim),
                launch=launch,
            )
        assert fields is not None, "only with large tiles a plan has large items"
        assert isinstance(self._large_kernel, Fa2Kernel)
        launch = self._large_kernel.launch(
            fields, view(fields.field), step.n_large_items, self._geometry.large_tile, results=self._results
        )
        ordered_queries = self._ordered_queries[: step.n_rows]
        return partial(attend_shared_by_fa2, order=order, ordered_queries=ordered_queries, launch=launch)


@dataclass(frozen=True)
class StepAttention:
    """Attention of one planned step: decode rows first, then prompt rows."""

    windows: Sequence[int | None]
    """Sliding window of each layer, None for all positions."""
    kv_scales: Sequence[LayerScales]
    """Scales of K and V of each layer."""
    sinks: Sequence[Tensor | None]
    """Sinks of each layer, as for ``sinks.apply_sinks``; None for layers without."""
    n_decode: int
    """Decode rows."""
    decode: Mapping[int | None, Sequence[LayerLaunch]]
    """Launches of the decode rows by window; empty if there are none."""
    prompts: PrefillLaunches
    """Launches of the prompt rows by window; empty if there are none."""

    def run(self, layer: int, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        """Computes one layer, as ``LayerAttention.run``; q and out are [tokens, heads, head_dim]."""
        window, n, scales, sinks = self.windows[layer], self.n_decode, self.kv_scales[layer], self.sinks[layer]
        if self.decode:
            rows = LayerTensors(q[:n], k_cache, v_cache, out[:n], scales, sinks)
            for launch in self.decode[window]:
                launch(rows)
        if self.prompts:
            self.prompts[window](LayerTensors(q[n:], k_cache, v_cache, out[n:], scales, sinks))


def _large_tile(shape: AttentionShape, shared_kernel: SharedKernel | None) -> int:
    """Returns how many (query, head) pairs of one KV head fit a tile of the kernel; 0 without one."""
    if shared_kernel is None:
        return 0
    return tile_queries(shape.head_dim) if shared_kernel == "fa3" else fa2_tile(shape.head_dim)
