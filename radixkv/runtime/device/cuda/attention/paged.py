"""Attention over the paged pool on one GPU: planned on the host by arrays, enqueued without waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from radixkv.runtime.device.cuda.attention.decode import DecodePlanner, DecodeStep, Geometry, Variant
from radixkv.runtime.device.cuda.attention.kernels import Launch, RequestKernel, Results, Shape, TileKernel
from radixkv.runtime.device.cuda.attention.merge import gather, merge
from radixkv.runtime.device.cuda.attention.rows import attend
from radixkv.runtime.device.cuda.attention.schedule import TileSchedule, causal_tiles, tile_queries
from radixkv.runtime.device.cuda.attention.sharing import SharingCosts
from radixkv.runtime.device.cuda.attention.work import N_COLUMNS, Ints, RequestFields
from radixkv.runtime.device.cuda.staging import Layout, Staged, Staging
from radixkv.runtime.device.cuda.transfer import to_device
from radixkv.runtime.plan import SharedRun


@dataclass(frozen=True)
class PromptStep:
    """A step's prompt rows, planned; their numbers are on the way to the device."""

    numbers: Tensor
    """Int32: a ``TileSchedule`` on Hopper, else items."""
    plan: tuple[int, ...]
    work: RequestFields | None
    n_items: int


class PagedAttention:
    """Attention of one model on one GPU.

    Decode rows come first in a batch. Block tables are read by the kernels themselves, so that they must be up to
    date before a step's first layer; entries behind a row's last page are never followed.

    Memory: partial results, about 80 MB at 1,024 rows of 32 heads of 128 in bfloat16.

    Args:
        shape: heads, page size and dtype: float16 or bfloat16.
        windows: by layer, how many positions a token sees, its own included; None for all.
        max_rows: rows of a step; their slots are below it, and that of padding is it.
        layout: gets the fields.
        device: where.
        costs: what decides whether shared pages are read once for many rows.
        prompt_kernel: None for FA3 on Hopper, and FA2 elsewhere.
    """

    def __init__(
        self,
        shape: Shape,
        windows: Sequence[int | None],
        *,
        max_rows: int,
        layout: Layout,
        device: torch.device,
        costs: SharingCosts | None = None,
        prompt_kernel: Literal["fa2", "fa3"] | None = None,
    ) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._shape = shape
        self._windows = tuple(windows)
        self._device = device
        is_hopper = (properties.major, properties.minor) == (9, 0)
        self._uses_tiles = (prompt_kernel or ("fa3" if is_hopper else "fa2")) == "fa3"
        self._geometry = Geometry(
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            page_size=shape.page_size,
            token_bytes=2 * shape.n_kv_heads * shape.head_dim * shape.dtype.itemsize,
            small_tile=next(tile for tile in (16, 32, 64, 128) if tile >= shape.group),
            large_tile=64 if shape.head_dim > 128 else 128,
            n_processors=properties.multi_processor_count,
        )
        self._max_rows = max_rows
        self._decode = DecodePlanner(
            self._geometry, windows, max_rows=max_rows, layout=layout, costs=costs or SharingCosts()
        )

    def connect(self, staging: Staging, tables: Tensor) -> None:
        """Binds the device's memory and loads the kernels, which compile for minutes where they are not prebuilt.

        Args:
            staging: of the complete layout.
            tables: [max_rows + 1, width] int32; stays where it is.
        """
        shape, distinct = self._shape, set(self._windows)
        self._staging = staging
        self._tables = tables
        if self._uses_tiles:
            self._tile_kernels = {window: TileKernel(shape, window, tables) for window in distinct}
        else:
            self._request_kernels = {window: RequestKernel(shape, window, tables) for window in distinct}
        if None in distinct:
            self._large_kernel = RequestKernel(shape, None, tables)
        self._results = Results.of(self._decode.n_results, shape, self._device)
        self._ordered = torch.zeros(
            self._max_rows, shape.n_heads, shape.head_dim, dtype=shape.dtype, device=self._device
        )

    def variants(self, bucket: int) -> list[Variant]:
        """The ways in which a bucket's graph may compute."""
        return self._decode.variants(bucket)

    def plan_decode(
        self,
        staged: Staged,
        slots: Ints,
        lengths: Ints,
        shared: Sequence[SharedRun] = (),
        bucket: int | None = None,
        variant: Variant | None = None,
    ) -> DecodeStep:
        """Chooses how to compute a step's decode rows, and stages it.

        Args:
            slots: [rows].
            lengths: [rows], positions that each row reads, its own included.
            shared: what rows share, see ``StepPlan.shared``.
            bucket: rows of the graph that will run, in the variant that the step says; None runs without a graph.
            variant: None for the best.
        """
        return self._decode.plan(staged, slots, lengths, self._tables.shape[1], shared, bucket, variant)

    def plan_prompts(self, slots: Ints, starts: Ints, n_tokens: Ints) -> PromptStep:
        """Schedules the prompt rows, and sends the schedule on the current stream.

        Args:
            slots, starts, n_tokens: [rows]; a row's tokens follow on those of the row before it.
        """
        firsts = np.cumsum(n_tokens, dtype=np.int32) - n_tokens
        entries, lengths = slots * np.int32(self._tables.shape[1]), starts + n_tokens
        if self._uses_tiles:
            schedule = TileSchedule.of(
                firsts,
                n_tokens,
                lengths,
                entries,
                n_heads=self._shape.n_heads,
                tile=tile_queries(self._shape.head_dim),
                n_processors=self._geometry.n_processors,
            )
            return PromptStep(to_device(schedule.numbers, self._device), tuple(schedule.plan), None, 0)
        tile = self._geometry.large_tile // self._geometry.group
        items = causal_tiles(firsts, n_tokens, lengths, entries, tile=tile)
        layout = Layout()
        work = RequestFields.place(len(items), layout)
        host = Staged(torch.empty(layout.size, dtype=torch.int32, pin_memory=True))
        page_size, n_entries = self._shape.page_size, self._tables.numel()
        work.fill(host, items, items.first_queries, len(items), page_size=page_size, n_entries=n_entries)
        return PromptStep(host.buffer.to(self._device, non_blocking=True), (), work, len(items))

    def step(self, decode: DecodeStep | None, prompts: PromptStep | None) -> StepAttention:
        """The planned step, as the decoder runs it."""
        distinct = set(self._windows)
        return StepAttention(
            self._windows,
            0 if decode is None else decode.n_rows,
            {} if decode is None else {window: self._decode_launch(decode, window) for window in distinct},
            {} if prompts is None else {window: self._prompt_launch(prompts, window) for window in distinct},
        )

    def _decode_launch(self, step: DecodeStep, window: int | None) -> _DecodeLaunch:
        fields, view, large = self._decode.work[window], self._staging.view, None
        if window is None and step.n_large_items:
            work, tile = self._decode.large_work, self._geometry.large_tile
            numbers = view(work.field)
            large = self._large_kernel.launch(work, numbers, step.n_large_items, tile, results=self._results)
        return _DecodeLaunch(
            tables=self._tables,
            items=view(fields.items.field).view(N_COLUMNS, fields.items.capacity),
            n_items=step.n_items,
            tile=self._geometry.small_tile,
            order=view(self._decode.order)[: step.n_rows],
            is_merged=step.variant != "whole",
            merge_indptr=view(fields.merge_indptr)[: step.n_rows + 1],
            merge_listed=view(fields.merge_listed),
            results=self._results,
            large=large,
            ordered=self._ordered[: step.n_rows],
        )

    def _prompt_launch(self, step: PromptStep, window: int | None) -> Launch:
        if step.work is None:
            return self._tile_kernels[window].launch(step.numbers, list(step.plan))
        kernel, tile = self._request_kernels[window], self._geometry.large_tile
        return kernel.launch(step.work, step.numbers, step.n_items, tile, is_causal=True)


class StepAttention:
    """One planned step: decode rows first, then prompt rows.

    Args:
        windows: by layer.
        n_decode: rows.
        decode, prompts: by window; empty for no such rows.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        n_decode: int,
        decode: Mapping[int | None, _Enqueue],
        prompts: Mapping[int | None, _Enqueue],
    ) -> None:
        self._windows = windows
        self._n_decode = n_decode
        self._decode = decode
        self._prompts = prompts

    def run(self, layer: int, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        """As in ``LayerAttention``: q and out are [tokens, heads, head_dim]."""
        window, n = self._windows[layer], self._n_decode
        if self._decode:
            self._decode[window](q[:n], k_cache, v_cache, out[:n])
        if self._prompts:
            self._prompts[window](q[n:], k_cache, v_cache, out[n:])


class _Enqueue(Protocol):
    """Enqueues one layer; q and out are [queries, heads, head_dim]."""

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None: ...


@dataclass(frozen=True)
class _DecodeLaunch:
    """A layer's decode rows."""

    tables: Tensor
    items: Tensor
    n_items: int
    tile: int
    order: Tensor
    is_merged: bool
    merge_indptr: Tensor
    merge_listed: Tensor
    results: Results
    large: Launch | None
    """Of pages that many rows share, for queries in order."""
    ordered: Tensor

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        results = self.results
        if self.large is not None:
            gather(q, self.order, self.ordered)
            self.large(self.ordered, k_cache, v_cache, out)
        attend(
            q,
            k_cache,
            v_cache,
            self.tables,
            self.items,
            self.order,
            out,
            results.values,
            results.lse,
            n_items=self.n_items,
            tile=self.tile,
            is_even=not self.is_merged,
        )
        if self.is_merged:
            merge(results.values, results.lse, self.merge_indptr, self.merge_listed, self.order, out)
