"""A step's decode rows as work items, on the host alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from radixkv.runtime.device.attention.cuda.decode_tiles import Block, Variant, block_of
from radixkv.runtime.device.attention.cuda.fa3_shared import TileFields, part_tokens
from radixkv.runtime.device.attention.cuda.shared_runs import SharedKernel, Sharing, SharingChoice, SharingCosts
from radixkv.runtime.device.attention.cuda.work_items import Ints, ItemFields, Items, Merge, RequestFields
from radixkv.runtime.device.staging_cuda import Field, Layout, Staged
from radixkv.runtime.step.plan import SharedRun

_MIN = 64
"""Tokens of a part of a row, of which 8 are merged at a time: rows that are short in all have 8 parts at most."""
_MULTIPLE = 32
"""Of tokens, that parts of rows are."""
_MAX_PARTS = 16
"""Of a row, which are merged one after another."""
_REQUEST_PART = 128
"""Tokens that an item of FA2's tiles reads at least; parts are multiples of it."""
_TILE_PART = 192
"""The same for FA3, which reads 96 tokens at a time; items begin with a page, of 64 tokens at most."""
_UNCUT = 1 << 30
"""Tokens of a part that is a whole row."""
_READ_NS = 1.0
"""A token of 4 KiB, as fast as an H200 reads."""
_FEW_SPLIT_NS = 4900.0
"""What cutting few rows costs a layer: results are merged."""
_SPLIT_NS = 3000.0
"""The same of many."""


@dataclass(frozen=True)
class Geometry:
    """What planning needs to know of model and GPU."""

    n_heads: int
    n_kv_heads: int
    page_size: int
    token_bytes: int
    """K and V of one token in one layer."""
    small_tile: int
    """(Query, head) pairs of one KV head that an item of a row's own pages holds."""
    large_tile: int
    """Those that an item of many rows' pages holds."""
    n_processors: int
    """Multiprocessors."""
    shared_bytes: int
    """Shared memory of each."""
    head_dim: int

    @property
    def group(self) -> int:
        """Heads that share a KV head."""
        return self.n_heads // self.n_kv_heads

    def items_at_once(self, blocks: int) -> int:
        """Items that give each multiprocessor so many blocks of threads."""
        return max(blocks * self.n_processors // self.n_kv_heads, 1)


@dataclass(frozen=True)
class DecodeStep:
    """A step's decode rows, planned and staged."""

    n_rows: int
    """Padding included."""
    variant: Variant
    block: Block
    """Of threads, that compute the small items."""
    n_items: int
    n_large_items: int


@dataclass(frozen=True)
class WindowFields:
    """Where the items of the layers of one window are staged."""

    items: ItemFields
    merge_indptr: Field
    merge_listed: Field


class DecodePlanner:
    """Cuts decode rows into items, chooses which shared pages are read once, and stages the result.

    One item a row is best where there are many rows of about one length. Rows are cut where they are few, or where
    one is far longer than the others. Pages that rows share are read once for as many as fit a tile: of few rows
    along with the rows' own pages, of many in large tiles, which are a launch of their own.

    Args:
        windows: all layers', None for all positions.
        max_rows: rows of a step; their slots are below it, and that of padding is it.
        layout: gets the fields.
        shared_kernel: what large tiles are staged for.
    """

    def __init__(
        self,
        geometry: Geometry,
        windows: Sequence[int | None],
        *,
        max_rows: int,
        layout: Layout,
        costs: SharingCosts,
        shared_kernel: SharedKernel,
    ) -> None:
        self._geometry = geometry
        self._max_rows = max_rows
        self._reads_all = None in windows
        self._longest = _UNCUT if self._reads_all else max(window for window in windows if window is not None)
        self._choice = SharingChoice(
            costs,
            page_size=geometry.page_size,
            token_bytes=geometry.token_bytes,
            group=geometry.group,
            small_tile=geometry.small_tile,
            large_tile=geometry.large_tile,
        )
        cut: list[Variant] = ["split", "shared"]
        n_small = max(self._n_items(n_rows, variant) for n_rows in range(1, max_rows + 1) for variant in cut)
        n_large = self._n_large_items(max_rows)
        small_rows, large_rows = geometry.small_tile // geometry.group, geometry.large_tile // geometry.group
        self.n_results = n_small * small_rows + n_large * large_rows
        """Results that are merged, at most."""
        self.work = {
            window: WindowFields(
                ItemFields.place(n_small, layout), layout.field(max_rows + 1), layout.field(self.n_results)
            )
            for window in sorted(set(windows), key=lambda window: window or 0)
        }
        """By window."""
        self.n_large_results = n_large * large_rows
        """Those of large items, at most, which are the first."""
        self.large_work: RequestFields | TileFields
        if shared_kernel == "fa2":
            self.large_work = RequestFields.place(n_large, layout)
        else:
            self.large_work = TileFields.place(
                n_large, geometry.n_kv_heads, geometry.group, geometry.n_processors, layout
            )
        self.order = layout.field(max_rows)
        """[rows]: which row of the batch each query is."""

    def variants(self, bucket: int) -> list[Variant]:
        """The ways in which a bucket's graph may compute."""
        return ["whole", "split", "shared"] if self._reads_all and bucket > 1 else ["whole", "split"]

    def plan(
        self,
        staged: Staged,
        batch_slots: Ints,
        lengths: Ints,
        width: int,
        shared: Sequence[SharedRun] = (),
        bucket: int | None = None,
        variant: Variant | None = None,
    ) -> DecodeStep:
        """Stages the rows, filled up to the bucket with rows of one token.

        Args:
            slots: [rows].
            lengths: [rows], positions that each row reads.
            width: entries of a block table.
            shared: as in ``StepPlan.shared``; the same object only for the same runs.
            bucket: rows of a graph; None for a grid of just what is needed.
            variant: None for the best.
        """
        n_rows = len(batch_slots) if bucket is None else bucket
        padding = n_rows - len(batch_slots)
        batch_slots = np.concatenate([batch_slots, np.full(padding, self._max_rows, np.int32)])
        lengths = np.concatenate([lengths, np.ones(padding, np.int32)])
        sharing = None
        if variant is None:
            sharing = self._choice.choose(shared, n_rows, *self._max_tiles(n_rows)) if self._reads_all else None
            variant = "shared" if sharing is not None else "split" if self._pays_to_split(lengths) else "whole"
        order = np.arange(n_rows, dtype=np.int32) if sharing is None else sharing.order
        staged[self.order][:n_rows] = order
        batch_slots, lengths = batch_slots[order], lengths[order]
        n_items, n_large_items = self._n_items(n_rows, variant), 0
        for window, fields in self.work.items():
            small, large = self._spans(batch_slots, lengths, width, window, sharing if window is None else None)
            if variant == "whole":
                fields.items.fill(staged, small.cut(_UNCUT), np.full(n_rows, -1, np.int32), n_items)
                continue
            small = small.cut(self._part(small.ends - small.begins, n_rows, variant), _MULTIPLE)
            large = self._large_cut(large, n_rows)
            merge = Merge.of(n_rows, Items.joined(large, small))
            fields.items.fill(staged, small, merge.results[len(large) :], n_items)
            staged[fields.merge_indptr][: n_rows + 1] = merge.indptr
            staged[fields.merge_listed][: len(merge.listed)] = merge.listed
            if window is None and variant == "shared":
                n_large_items = self._n_large_items(n_rows) if bucket is not None else len(large)
                self._fill_large(staged, large, merge.results[: len(large)], n_large_items, width)
        return DecodeStep(n_rows, variant, self._block(n_rows, variant), n_items, n_large_items)

    def _fill_large(self, staged: Staged, items: Items, results: Ints, n_padded: int, width: int) -> None:
        page_size = self._geometry.page_size
        if not n_padded:
            return
        if isinstance(self.large_work, TileFields):
            self.large_work.fill(staged, items, results, n_padded, page_size)
        else:
            n_entries = (self._max_rows + 1) * width
            self.large_work.fill(staged, items, results, n_padded, page_size=page_size, n_entries=n_entries)

    def _pays_to_split(self, lengths: Ints) -> bool:
        """Whether the longest rows, or uneven numbers of rows, hold up the step by more than cutting costs."""
        lengths, geometry = np.minimum(lengths, self._longest), self._geometry
        n_rows, total = len(lengths), int(lengths.sum())
        blocks = n_rows * geometry.n_kv_heads / geometry.n_processors
        unevenness = math.ceil(blocks) / blocks if 1 < blocks <= 4 else 1.0
        read_ns = total * _READ_NS * geometry.token_bytes / 4096
        split, whole = self._block(n_rows, "split"), self._block(n_rows, "whole")
        part_ns, longest_ns = split.ns(self._part(lengths, n_rows, "split")), whole.ns(int(lengths.max()))
        split_ns = max(read_ns, part_ns) + (_FEW_SPLIT_NS if blocks <= 1 else _SPLIT_NS)
        return max(read_ns * (1 + unevenness) / 2, longest_ns) > split_ns

    def _block(self, n_rows: int, variant: Variant) -> Block:
        geometry = self._geometry
        n_blocks = self._n_items(n_rows, variant) * geometry.n_kv_heads
        return block_of(variant, n_blocks, geometry.n_processors, geometry.head_dim, geometry.shared_bytes)

    def _n_cuts(self, n_rows: int, variant: Variant) -> int:
        """Items that cutting may add: few rows get a block for each multiprocessor, more so many that all share out
        evenly; where pages are shared, so many that all run at a time."""
        few, wave = self._geometry.items_at_once(1), self._geometry.items_at_once(8)
        if variant == "shared":
            return wave - n_rows if 2 * n_rows <= wave else wave
        return few if n_rows <= few else max(2 * wave - n_rows, wave)

    def _n_items(self, n_rows: int, variant: Variant) -> int:
        """Items launched, enough for any lengths: each row's last, each shared tile's last, and what cuts add."""
        if variant == "whole":
            return n_rows
        n_shared = self._max_tiles(n_rows)[0] if variant == "shared" else 0
        return n_rows + n_shared + self._n_cuts(n_rows, variant)

    def _n_large_items(self, n_rows: int) -> int:
        return self._max_tiles(n_rows)[1] + self._geometry.items_at_once(4)

    def _max_tiles(self, n_rows: int) -> tuple[int, int]:
        """Small and large tiles that shared runs may fill."""
        return max(n_rows // 4, 1), max(2 * n_rows * self._geometry.group // self._geometry.large_tile, 1)

    def _part(self, lengths: Ints, n_rows: int, variant: Variant) -> int:
        """Tokens of a part of a row, a multiple of ``_MULTIPLE``, so that cutting adds no more than ``_n_cuts``."""
        n_tokens = int(lengths.sum())
        most = max(n_tokens / self._n_cuts(n_rows, variant), int(lengths.max()) / _MAX_PARTS)
        return math.ceil(max(most, min(n_tokens / 8, _MIN)) / _MULTIPLE) * _MULTIPLE

    def _large_cut(self, items: Items, n_rows: int) -> Items:
        """Items of large tiles, so that no more are launched than there is room for."""
        geometry, n_most = self._geometry, self._n_large_items(n_rows)
        if isinstance(self.large_work, TileFields):
            part = part_tokens(items, geometry.n_kv_heads, geometry.n_processors, n_most, _TILE_PART)
            return items.cut(part, _TILE_PART)
        n_tokens = int((items.ends - items.begins).sum())
        part = max(-(-n_tokens // (geometry.items_at_once(4) * _REQUEST_PART)), 1) * _REQUEST_PART
        return items.cut(part, _REQUEST_PART)

    def _spans(
        self, batch_slots: Ints, lengths: Ints, width: int, window: int | None, sharing: Sharing | None
    ) -> tuple[Items, Items]:
        """What small tiles read, rows' own pages and those that few rows share; and what large tiles do."""
        page_size, group = self._geometry.page_size, self._geometry.group
        rows = np.arange(len(batch_slots), dtype=np.int32)
        begins = np.zeros_like(lengths) if window is None else np.maximum(lengths - np.int32(window), 0)
        if sharing is not None:
            begins = sharing.covered_pages * np.int32(page_size)
        own = Items(rows, np.ones_like(rows), batch_slots * np.int32(width), begins, lengths)
        tiles: dict[bool, list[tuple[int, int, int, int, int]]] = {False: [], True: []}
        for run in () if sharing is None else sharing.runs:
            size = (self._geometry.large_tile if run.is_large else self._geometry.small_tile) // group
            first_entry = int(batch_slots[run.first_row]) * width
            begin, end = run.first_page * page_size, (run.first_page + run.n_pages) * page_size
            last_row = run.first_row + run.n_rows
            tiles[run.is_large] += [
                (first, min(size, last_row - first), first_entry, begin, end)
                for first in range(run.first_row, last_row, size)
            ]
        small, large = (np.array(tiles[is_large], dtype=np.int32).reshape(-1, 5).T for is_large in (False, True))
        return Items.joined(own, Items(*small)) if tiles[False] else own, Items(*large)
