"""Attention over the paged pool on one GPU: planned on the host by arrays, enqueued without waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from radixkv.runtime.device.attention.cuda.decode_plan import DecodePlanner, DecodeStep, Geometry
from radixkv.runtime.device.attention.cuda.decode_tiles import Variant
from radixkv.runtime.device.attention.cuda.fa3_prefill import TileSchedule, causal_tiles, tile_queries
from radixkv.runtime.device.attention.cuda.fa3_shared import TileFields
from radixkv.runtime.device.attention.cuda.flashinfer import (
    Launch,
    RequestKernel,
    Results,
    Shape,
    TileKernel,
    backend_of,
)
from radixkv.runtime.device.attention.cuda.layer_launches import DecodeLaunch, Enqueue, RequestsLaunch, TilesLaunch
from radixkv.runtime.device.attention.cuda.shared_runs import SharedKernel, SharingCosts
from radixkv.runtime.device.attention.cuda.work_items import N_COLUMNS, Ints, RequestFields
from radixkv.runtime.device.staging_cuda import Layout, Staged, Staging
from radixkv.runtime.device.transfer_cuda import to_device
from radixkv.runtime.step.plan import SharedRun


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

    Memory: partial results and copies of queries, about 115 MB at 1,024 rows of 32 heads of 128 in bfloat16.

    Args:
        shape: heads, page size and dtype: float16 or bfloat16.
        windows: by layer, how many positions a token sees, its own included; None for all.
        max_rows: rows of a step; their slots are below it, and that of padding is it.
        layout: gets the fields.
        device: where.
        costs: what decides whether shared pages are read once for many rows.
        prompt_kernel: None for FA3 on Hopper, and FA2 elsewhere.
        shared_kernel: of pages that many rows share; None for the same.
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
        shared_kernel: SharedKernel | None = None,
    ) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._shape = shape
        self._windows = tuple(windows)
        self._device = device
        backend = backend_of((properties.major, properties.minor))
        self._uses_tiles = (prompt_kernel or backend) == "fa3"
        shared_kernel = shared_kernel or backend
        self._geometry = Geometry(
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            page_size=shape.page_size,
            token_bytes=2 * shape.n_kv_heads * shape.head_dim * shape.dtype.itemsize,
            small_tile=next(tile for tile in (16, 32, 64) if tile >= shape.group),
            large_tile=_large_tile(shape, shared_kernel),
            n_processors=properties.multi_processor_count,
            shared_bytes=properties.shared_memory_per_multiprocessor,
            head_dim=shape.head_dim,
        )
        self._max_rows = max_rows
        self._decode = DecodePlanner(
            self._geometry,
            windows,
            max_rows=max_rows,
            layout=layout,
            costs=costs or SharingCosts.of(shared_kernel),
            shared_kernel=shared_kernel,
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
        by_member = isinstance(self._decode.large_work, TileFields)
        if None in distinct:
            self._large_kernel = (TileKernel if by_member else RequestKernel)(shape, None, tables)
        self._results = Results.of(self._decode.n_results, shape, self._device, by_member=by_member)
        n_ordered = self._decode.n_large_results if by_member else self._max_rows
        self._ordered = torch.zeros(
            n_ordered, shape.n_heads, shape.head_dim, dtype=shape.dtype, device=self._device
        )

    def variants(self, bucket: int) -> list[Variant]:
        """The ways in which a bucket's graph may compute."""
        return self._decode.variants(bucket)

    def plan_decode(
        self,
        staged: Staged,
        batch_slots: Ints,
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
        return self._decode.plan(staged, batch_slots, lengths, self._tables.shape[1], shared, bucket, variant)

    def plan_prompts(self, batch_slots: Ints, starts: Ints, n_tokens: Ints) -> PromptStep:
        """Schedules the prompt rows, and sends the schedule on the current stream.

        Args:
            slots, starts, n_tokens: [rows]; a row's tokens follow on those of the row before it.
        """
        firsts = np.cumsum(n_tokens, dtype=np.int32) - n_tokens
        entries, lengths = batch_slots * np.int32(self._tables.shape[1]), starts + n_tokens
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
        tile = _large_tile(self._shape, "fa2") // self._geometry.group
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

    def _decode_launch(self, step: DecodeStep, window: int | None) -> DecodeLaunch:
        fields, view = self._decode.work[window], self._staging.view
        has_large = window is None and step.n_large_items > 0
        return DecodeLaunch(
            tables=self._tables,
            items=view(fields.items.field).view(N_COLUMNS, fields.items.capacity),
            n_items=step.n_items,
            tile=self._geometry.small_tile,
            block=step.block,
            order=view(self._decode.order)[: step.n_rows],
            is_merged=step.variant != "whole",
            merge_indptr=view(fields.merge_indptr)[: step.n_rows + 1],
            merge_listed=view(fields.merge_listed),
            results=self._results,
            group=self._geometry.group,
            large=self._large_launch(step) if has_large else None,
        )

    def _large_launch(self, step: DecodeStep) -> Enqueue:
        work, view, tile = self._decode.large_work, self._staging.view, self._geometry.large_tile
        order = view(self._decode.order)[: step.n_rows]
        if isinstance(work, TileFields):
            assert isinstance(self._large_kernel, TileKernel)
            pairs = (len(self._ordered) * self._geometry.group, self._shape.n_kv_heads)
            values, lse = (results[: len(self._ordered)] for results in (self._results.values, self._results.lse))
            launch = self._large_kernel.launch(view(work.field), work.plan, is_causal=False, lse=lse.view(pairs))
            return TilesLaunch(
                order,
                view(work.copies).view(3, work.capacity),
                step.n_large_items,
                tile // self._geometry.group,
                self._geometry.group,
                self._ordered,
                values.view(*pairs, self._shape.head_dim),
                launch,
            )
        assert isinstance(self._large_kernel, RequestKernel)
        launch = self._large_kernel.launch(work, view(work.field), step.n_large_items, tile, results=self._results)
        return RequestsLaunch(order, self._ordered[: step.n_rows], launch)

    def _prompt_launch(self, step: PromptStep, window: int | None) -> Launch:
        if step.work is None:
            return self._tile_kernels[window].launch(step.numbers, list(step.plan))
        kernel, tile = self._request_kernels[window], _large_tile(self._shape, "fa2")
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
        decode: Mapping[int | None, Enqueue],
        prompts: Mapping[int | None, Enqueue],
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


def _large_tile(shape: Shape, shared_kernel: SharedKernel) -> int:
    """(Query, head) pairs of one KV head that a tile of the kernel holds."""
    if shared_kernel == "fa3":
        return tile_queries(shape.head_dim)
    return 64 if shape.head_dim > 128 else 128
