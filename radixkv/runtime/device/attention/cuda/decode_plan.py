"""Planning of decode attention on the host: a step's decode rows become work items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixkv.runtime.device.attention.base import longest_window
from radixkv.runtime.device.attention.cuda.base import DecodeRows, Geometry
from radixkv.runtime.device.attention.cuda.decode_tiles import TileConfig, Variant, choose_tile_config
from radixkv.runtime.device.attention.cuda.fa3_shared import Fa3Fields, choose_part_tokens
from radixkv.runtime.device.attention.cuda.run_selection import (
    SharedKernel,
    SharedRunSelector,
    SharingCosts,
    SharingPlan,
)
from radixkv.runtime.device.attention.cuda.work_items import (
    UNLIMITED,
    Fa2Fields,
    Ints,
    ItemFields,
    MergePlan,
    WorkItems,
)
from radixkv.runtime.device.memory.cuda.staging import StagingBuffer, StagingField, StagingLayout

_MIN_PART = 64
"""Fewest tokens per part of a row, unless all rows together have fewer than 512 tokens: these get 8 parts at most,
the number that the merge kernel reads at a time."""
_PART_MULTIPLE = 32
"""Parts of rows are multiples of this many tokens."""
_MAX_PARTS = 16
"""Most parts of a row, as they are merged sequentially."""
_MIN_FA2_PART = 128
"""Fewest tokens that an item of large FA2 tiles reads; parts are multiples of it."""
_MIN_FA3_PART = 192
"""Fewest tokens that an item of large FA3 tiles reads. FA3 reads 96 tokens at a time, and items start at a page, of
at most 64 tokens."""
_WHOLE_ROW = 1 << 30
"""Part size that leaves every row whole."""
_MAX_PROMPT_READS = 1 << 18
"""Most positions that small tiles read in a layer for prompts whose tokens are a row each."""
_READ_TOKEN_NS = 1.0
"""Nanoseconds to read one token of 4 KiB at an H200's bandwidth."""
_SPLIT_FEW_ROWS_NS = 4900.0
"""Nanoseconds per layer that splitting few rows costs, as results are merged."""
_SPLIT_MANY_ROWS_NS = 3000.0
"""Nanoseconds per layer that splitting many rows costs."""


@dataclass(frozen=True)
class DecodeStep:
    """A step's decode rows, planned and staged."""

    n_rows: int
    """Rows, padding included."""
    variant: Variant
    tile: int
    """(Query, head) pairs that fit a small item."""
    tile_config: TileConfig
    """Tile of the kernel of the small items."""
    n_items: int
    """Small items to launch, padding included."""
    n_large_items: int
    """Large items to launch."""


@dataclass(frozen=True)
class WindowFields:
    """Staging fields of the small items and merges of all layers with one window."""

    items: ItemFields
    merge_indptr: StagingField
    merge_indices: StagingField


class DecodePlanner:
    """Splits decode rows into work items, chooses which shared pages are read once, and stages the result.

    One item per row is best for many rows of similar length. Rows are split where there are few of them, or where
    one is far longer than the others. Pages that rows share are read once for as many rows as fit a tile. If few
    rows share them, small tiles in the launch of the rows' own pages read them; if many do, large tiles in a launch
    of their own, where there are large tiles.

    Consecutive tokens of one request are a row each: a token and its drafts, or a short prompt. They see the same
    pages, but for the last ones. In steps with such rows each small tile reads these pages once for as many of them
    as fit. Small tiles are wide then, and there are no large ones.

    Args:
        geometry: sizes of model and GPU.
        windows: sliding windows of all layers, None for all positions.
        max_rows: most rows of a step. Batch slots are below it; padding has this batch slot.
        layout: the staging fields are added to it.
        costs: decide which shared pages are read once.
        shared_kernel: the FlashInfer kernel of large tiles; None: there are no large tiles.
    """

    def __init__(
        self,
        geometry: Geometry,
        windows: Sequence[int | None],
        *,
        max_rows: int,
        layout: StagingLayout,
        costs: SharingCosts,
        shared_kernel: SharedKernel | None,
    ) -> None:
        assert (shared_kernel is None) == (geometry.large_tile == 0)
        self._geometry = geometry
        self._max_rows = max_rows
        longest = longest_window(windows)
        self._reads_all = longest is None
        self._longest = _WHOLE_ROW if longest is None else longest
        self._extend_geometry = geometry.for_extend()
        self._shared_run_selector = SharedRunSelector(costs, geometry)
        self._extend_run_selector = SharedRunSelector(costs, self._extend_geometry)
        split_variants: list[Variant] = ["split", "shared"]
        n_small = max(
            self._n_items(n_rows, variant) for n_rows in range(1, max_rows + 1) for variant in split_variants
        )
        n_large = self._n_large_items(max_rows)
        n_results = n_small * geometry.small_rows + n_large * geometry.large_rows
        # Items of the variant ``extend`` have each row once before they are split, and shared tiles.
        n_more = max(self._n_items(n_rows, "extend") - n_rows for n_rows in range(1, max_rows + 1))
        n_results = max(n_results, max_rows + n_more * self._extend_geometry.small_rows)
        self.n_results = n_results
        """Most partial results of a layer."""
        self.fields = {
            window: WindowFields(
                ItemFields.allocate(n_small, layout), layout.field(max_rows + 1), layout.field(self.n_results)
            )
            for window in sorted(set(windows), key=lambda window: window or 0)
        }
        """Fields by window."""
        self.n_large_results = n_large * geometry.large_rows
        """Most partial results of large items; they come first."""
        self.large_fields: Fa2Fields | Fa3Fields | None = None
        if shared_kernel == "fa2":
            self.large_fields = Fa2Fields.allocate(n_large, layout)
        elif shared_kernel == "fa3":
            self.large_fields = Fa3Fields.allocate(n_large, geometry, layout)
        self.order = layout.field(max_rows)
        """[rows]: the step's row at each index of the planned order."""

    def variants(self, bucket: int) -> list[Variant]:
        """Returns the variants to capture for a bucket."""
        variants: list[Variant] = ["whole", "split"]
        if bucket > 1:
            variants += ["shared"] * self._reads_all
            variants.append("extend")
        return variants

    def fits_prompts(self, starts: Ints, n_tokens: Ints) -> bool:
        """Whether small tiles read what these prompt rows attend to about as fast as the kernel of prompts."""
        lengths, n_tiles = starts + n_tokens, -(-n_tokens // self._extend_geometry.small_rows)
        n_read = [
            n_tiles * lengths if window is None else n_tokens * np.minimum(lengths, window)
            for window in self.fields
        ]
        return max(int(of_rows.sum()) for of_rows in n_read) <= _MAX_PROMPT_READS

    def plan(
        self,
        staged: StagingBuffer,
        rows: DecodeRows,
        width: int,
        bucket: int | None = None,
        variant: Variant | None = None,
    ) -> DecodeStep:
        """Plans and stages the rows, padded to the bucket with rows of one token.

        Args:
            staged: the step's staging buffer.
            rows: the rows; with a ``runs_id`` the selection among their shared runs is cached.
            width: entries per block table.
            bucket: rows of the graph that will run; None pads no large items;
                small items are always padded to the most for this number of rows.
            variant: None chooses the fastest.
        """
        n_rows = len(rows.batch_slots) if bucket is None else bucket
        padding = n_rows - len(rows.batch_slots)
        batch_slots = np.concatenate([rows.batch_slots, np.full(padding, self._max_rows, np.int32)])
        lengths = np.concatenate([rows.lengths, np.ones(padding, np.int32)])
        sharing, counts = None, np.ones(n_rows, np.int32)
        if rows.counts is not None:
            variant, counts = "extend", np.concatenate([rows.counts, np.ones(padding, np.int32)])
            if self._reads_all:
                sharing = self._extend_run_selector.select(
                    rows.shared, None, len(counts), self._max_tiles(n_rows)[0], 0, counts
                )
            if sharing is not None:
                counts, sharing = counts[sharing.order], sharing.expanded(counts)
        elif variant is None:
            if self._reads_all:
                sharing = self._shared_run_selector.select(
                    rows.shared, rows.runs_id, n_rows, *self._max_tiles(n_rows)
                )
            variant = "shared" if sharing is not None else "split" if self._pays_to_split(lengths) else "whole"
        staged[self.order][:n_rows] = np.arange(n_rows) if sharing is None else sharing.order
        if sharing is not None:
            batch_slots, lengths = batch_slots[sharing.order], lengths[sharing.order]
        n_items, n_large_items = self._n_items(n_rows, variant), 0
        for window, fields in self.fields.items():
            small, large = self._unsplit_items(
                batch_slots, lengths, counts, width, window, sharing if window is None else None, variant
            )
            if variant == "whole":
                fields.items.fill(staged, small.split(_WHOLE_ROW), np.full(n_rows, -1, np.int32), n_items)
                continue
            small = small.split(self._part_tokens(small.ends - small.begins, n_rows, variant), _PART_MULTIPLE)
            large = self._split_large(large, n_rows) if len(large) else large
            merge = MergePlan.from_items(n_rows, WorkItems.joined(large, small))
            fields.items.fill(staged, small, merge.results[len(large) :], n_items)
            staged[fields.merge_indptr][: n_rows + 1] = merge.indptr
            staged[fields.merge_indices][: len(merge.indices)] = merge.indices
            if window is None and variant == "shared":
                n_large_items = self._n_large_items(n_rows) if bucket is not None else len(large)
                self._fill_large(staged, large, merge.results[: len(large)], n_large_items, width)
        tile = self._geometry_of(variant).small_tile
        return DecodeStep(n_rows, variant, tile, self._tile_config(n_rows, variant), n_items, n_large_items)

    def _geometry_of(self, variant: Variant) -> Geometry:
        return self._extend_geometry if variant == "extend" else self._geometry

    def _fill_large(
        self, staged: StagingBuffer, items: WorkItems, results: Ints, n_padded: int, width: int
    ) -> None:
        if self.large_fields is None or not n_padded:
            return
        if isinstance(self.large_fields, Fa3Fields):
            self.large_fields.fill(staged, items, results, n_padded)
        else:
            page_size, n_entries = self._geometry.shape.page_size, (self._max_rows + 1) * width
            self.large_fields.fill(staged, items, results, n_padded, page_size=page_size, n_entries=n_entries)

    def _pays_to_split(self, lengths: Ints) -> bool:
        """Whether long rows or an uneven load of multiprocessors cost more time than splitting rows does."""
        lengths, geometry = np.minimum(lengths, self._longest), self._geometry
        n_rows, total = len(lengths), int(lengths.sum())
        blocks = n_rows * geometry.shape.n_kv_heads / geometry.n_processors
        unevenness = math.ceil(blocks) / blocks if 1 < blocks <= 4 else 1.0
        read_ns = total * _READ_TOKEN_NS * geometry.shape.token_bytes / 4096
        split, whole = self._tile_config(n_rows, "split"), self._tile_config(n_rows, "whole")
        part_ns, longest_ns = (
            split.estimated_ns(self._part_tokens(lengths, n_rows, "split")),
            whole.estimated_ns(int(lengths.max())),
        )
        split_ns = max(read_ns, part_ns) + (_SPLIT_FEW_ROWS_NS if blocks <= 1 else _SPLIT_MANY_ROWS_NS)
        return max(read_ns * (1 + unevenness) / 2, longest_ns) > split_ns

    def _tile_config(self, n_rows: int, variant: Variant) -> TileConfig:
        geometry = self._geometry
        n_blocks = self._n_items(n_rows, variant) * geometry.shape.n_kv_heads
        return choose_tile_config(
            variant,
            n_blocks,
            geometry.n_processors,
            geometry.shape.head_dim,
            geometry.shared_bytes,
            has_8_bits=geometry.shape.kv_dtype.itemsize == 1,
        )

    def _n_splits(self, n_rows: int, variant: Variant) -> int:
        """Returns how many items splitting may add.

        Few rows get one block per multiprocessor, and more rows get enough blocks for an even load. With shared
        pages, all blocks run at the same time where twice the rows are at most 8 blocks per multiprocessor.
        """
        few, wave = self._geometry.items_at_once(1), self._geometry.items_at_once(8)
        if variant in ("shared", "extend"):
            return wave - n_rows if 2 * n_rows <= wave else wave
        return few if n_rows <= few else max(2 * wave - n_rows, wave)

    def _n_items(self, n_rows: int, variant: Variant) -> int:
        """Returns how many small items to launch: one per row and shared tile, and what splitting may add."""
        if variant == "whole":
            return n_rows
        n_shared = self._max_tiles(n_rows)[0] if variant in ("shared", "extend") else 0
        return n_rows + n_shared + self._n_splits(n_rows, variant)

    def _n_large_items(self, n_rows: int) -> int:
        n_tiles = self._max_tiles(n_rows)[1]
        return n_tiles + self._geometry.items_at_once(4) if n_tiles else 0

    def _max_tiles(self, n_rows: int) -> tuple[int, int]:
        """Returns how many small and large tiles shared runs may fill."""
        group, large_tile = self._geometry.shape.group, self._geometry.large_tile
        return max(n_rows // 4, 1), max(2 * n_rows * group // large_tile, 1) if large_tile else 0

    def _part_tokens(self, lengths: Ints, n_rows: int, variant: Variant) -> int:
        """Returns the tokens per part of a row, a multiple of ``_PART_MULTIPLE``.

        Splitting into such parts adds at most ``_n_splits`` items.
        """
        n_tokens = int(lengths.sum())
        minimum = max(n_tokens / self._n_splits(n_rows, variant), int(lengths.max()) / _MAX_PARTS)
        return math.ceil(max(minimum, min(n_tokens / 8, _MIN_PART)) / _PART_MULTIPLE) * _PART_MULTIPLE

    def _split_large(self, items: WorkItems, n_rows: int) -> WorkItems:
        """Splits items of large tiles, into at most ``_n_large_items``."""
        geometry, max_items = self._geometry, self._n_large_items(n_rows)
        if isinstance(self.large_fields, Fa3Fields):
            part = choose_part_tokens(items, geometry, max_items, _MIN_FA3_PART)
            return items.split(part, _MIN_FA3_PART)
        n_tokens = int((items.ends - items.begins).sum())
        part = max(-(-n_tokens // (geometry.items_at_once(4) * _MIN_FA2_PART)), 1) * _MIN_FA2_PART
        return items.split(part, _MIN_FA2_PART)

    def _unsplit_items(
        self,
        batch_slots: Ints,
        lengths: Ints,
        counts: Ints,
        width: int,
        window: int | None,
        sharing: SharingPlan | None,
        variant: Variant,
    ) -> tuple[WorkItems, WorkItems]:
        """Returns items of small tiles and of large tiles, before splitting.

        Small tiles read the rows' own pages, and pages that few rows share.
        """
        geometry = self._geometry_of(variant)
        page_size = geometry.shape.page_size
        begins = np.zeros_like(lengths) if window is None else np.maximum(lengths - np.int32(window), 0)
        if sharing is not None:
            begins = sharing.covered_pages * np.int32(page_size)
        rows, n_queries = np.arange(len(lengths), dtype=np.int32), np.ones_like(lengths)
        if variant == "extend" and window is None:
            rows, n_queries = _tiles(counts, geometry.small_rows)
        ends, limits = lengths[rows + n_queries - 1], lengths[rows]
        own = WorkItems.of(rows, n_queries, batch_slots[rows] * np.int32(width), begins[rows], ends, limits)
        tiles: dict[bool, list[tuple[int, int, int, int, int, int]]] = {False: [], True: []}
        for run in () if sharing is None else sharing.runs:
            size = geometry.large_rows if run.is_large else geometry.small_rows
            first_entry = int(batch_slots[run.first_row]) * width
            begin, end = run.first_page * page_size, (run.first_page + run.n_pages) * page_size
            last_row = run.first_row + run.n_rows
            tiles[run.is_large] += [
                (first, min(size, last_row - first), first_entry, begin, end, UNLIMITED)
                for first in range(run.first_row, last_row, size)
            ]
        small, large = (WorkItems(np.array(of_size, np.int32).reshape(-1, 6).T) for of_size in tiles.values())
        return WorkItems.joined(own, small), large


def _tiles(counts: Ints, size: int) -> tuple[NDArray[np.signedinteger], NDArray[np.signedinteger]]:
    """Cuts groups of ``counts`` consecutive rows into tiles of at most ``size``. Returns each tile's first row, and
    its number of rows."""
    firsts = counts.cumsum() - counts
    if int(counts.max()) <= size:
        return firsts, counts
    n_tiles = -(-counts // size)
    group = np.arange(len(counts)).repeat(n_tiles)
    offsets = (np.arange(len(group)) - (n_tiles.cumsum() - n_tiles)[group]) * size
    return firsts[group] + offsets, np.minimum(counts[group] - offsets, size)
