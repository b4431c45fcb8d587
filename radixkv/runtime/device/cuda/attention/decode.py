"""A step's decode rows as work items, on the host alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from radixkv.runtime.device.cuda.attention.sharing import Sharing, SharingChoice, SharingCosts
from radixkv.runtime.device.cuda.attention.work import Ints, Items, Spans, WorkFields, results_by_query
from radixkv.runtime.device.cuda.staging import Layout, Staged
from radixkv.runtime.plan import SharedRun

Variant = Literal["whole", "split", "shared"]
"""How rows are computed: each by one item; long ones by several, merged; shared pages once for many rows."""

_MIN_CHUNK = 128
"""Tokens that an item reads at least, where a row is cut."""
_SPLIT_COST = 160
"""What splitting costs, in tokens that one block of threads reads in that time: about 5 µs a layer."""


_UNCUT = 1 << 30
"""Tokens of a part that is a whole row."""


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
    """Multiprocessors; each runs two blocks of threads at a time."""

    @property
    def group(self) -> int:
        """Heads that share a KV head."""
        return self.n_heads // self.n_kv_heads

    @property
    def wave(self) -> int:
        """Items that run at a time."""
        return max(2 * self.n_processors // self.n_kv_heads, 1)


@dataclass(frozen=True)
class DecodeStep:
    """A step's decode rows, planned and staged."""

    n_rows: int
    """Padding included."""
    variant: Variant
    n_items: int
    n_large_items: int


class DecodePlanner:
    """Cuts decode rows into items, chooses which shared pages are read once, and stages the result.

    Above some 33 rows (with 8 KV heads) one item a row fills the GPU, unless one row is far longer than the others:
    then, and below, rows are cut so that no block of threads has much more to read than the mean. All items of a
    layer whose queries fit the small tile run in one launch; shared pages of more rows are a second one.

    Args:
        windows: all layers', None for all positions.
        max_rows: rows of a step; their slots are below it, and that of padding is it.
        layout: gets the fields.
    """

    def __init__(
        self,
        geometry: Geometry,
        windows: Sequence[int | None],
        *,
        max_rows: int,
        layout: Layout,
        costs: SharingCosts,
    ) -> None:
        self._geometry = geometry
        self._max_rows = max_rows
        self._reads_all = None in windows
        self._longest = 1 << 30 if self._reads_all else max(window for window in windows if window is not None)
        self._choice = SharingChoice(
            costs,
            page_size=geometry.page_size,
            token_bytes=geometry.token_bytes,
            group=geometry.group,
            small_tile=geometry.small_tile,
            large_tile=geometry.large_tile,
        )
        n_small = max(self._n_items(n_rows, "shared") for n_rows in range(1, max_rows + 1))
        n_large = self._n_large_items(max_rows)
        small_rows, large_rows = geometry.small_tile // geometry.group, geometry.large_tile // geometry.group
        self.n_results = n_small * small_rows + n_large * large_rows
        """Results that are merged, at most."""
        distinct = sorted(set(windows), key=lambda window: window or 0)
        self.work = {window: WorkFields.place(n_small, max_rows, layout) for window in distinct}
        """By window."""
        self.large_work = WorkFields.place(n_large, 0, layout)
        self.order = layout.field(max_rows)
        """[rows]: which row of the batch each query is; in variant "shared"."""
        self.merge_results = layout.field(self.n_results)
        """Query by query, as ``work.merge_indptr`` says; in variant "shared"."""

    def variants(self, bucket: int) -> list[Variant]:
        """The ways in which a bucket's graph may compute."""
        return ["whole", "split", "shared"] if self._reads_all and bucket > 1 else ["whole", "split"]

    def plan(
        self,
        staged: Staged,
        slots: Ints,
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
        n_rows = len(slots) if bucket is None else bucket
        padding = n_rows - len(slots)
        slots = np.concatenate([slots, np.full(padding, self._max_rows, np.int32)])
        lengths = np.concatenate([lengths, np.ones(padding, np.int32)])
        sharing = None
        if variant is None:
            sharing = self._choice.choose(shared, n_rows, *self._max_tiles(n_rows)) if self._reads_all else None
            variant = "shared" if sharing is not None else "split" if self._pays_to_split(lengths) else "whole"
        n_items, n_large_items = self._n_items(n_rows, variant), 0
        for window, fields in self.work.items():
            if window is None and variant == "shared":
                is_graph = bucket is not None
                n_large_items = self._stage_shared(staged, slots, lengths, width, sharing, is_graph)
                continue
            part_tokens = _UNCUT if variant == "whole" else self._part_tokens(lengths, window)
            items, indptr = self._rows_in_parts(slots, lengths, width, window, part_tokens)
            fields.fill(staged, items, n_items, self._n_entries(width), part_tokens=part_tokens)
            fields.fill_merge(staged, indptr, is_flashinfers=True)
        return DecodeStep(n_rows, variant, n_items, n_large_items)

    def _stage_shared(
        self, staged: Staged, slots: Ints, lengths: Ints, width: int, sharing: Sharing | None, is_graph: bool
    ) -> int:
        """Layers without a window in variant "shared"; how many large items. ``sharing`` None: no row shares."""
        n_rows, n_entries, work = len(slots), self._n_entries(width), self.work[None]
        order = np.arange(n_rows, dtype=np.int32) if sharing is None else sharing.order
        spans, large_spans = self._spans(slots[order], lengths[order], width, sharing)
        items = self._cut(spans, self._n_cuts(n_rows), _MIN_CHUNK, 0)
        work.fill(staged, items, self._n_items(n_rows, "shared"), n_entries)
        large_items = self._cut(large_spans, 2 * self._geometry.wave, 2 * _MIN_CHUNK, int(items.n_queries.sum()))
        n_large_items = self._n_large_items(n_rows) if is_graph else len(large_items)
        if n_large_items:
            self.large_work.fill(staged, large_items, n_large_items, n_entries)
        indptr, results = results_by_query(n_rows, items, large_items)
        work.fill_merge(staged, indptr, is_flashinfers=False)
        staged[self.order][:n_rows] = order
        staged[self.merge_results][: len(results)] = results
        return n_large_items

    def _n_entries(self, width: int) -> int:
        return (self._max_rows + 1) * width

    def _pays_to_split(self, lengths: Ints) -> bool:
        """Whether the longest rows, or too few of them, hold up the step by more than cutting costs."""
        lengths = np.minimum(lengths, self._longest)
        n_rows, longest, total, wave = len(lengths), int(lengths.max()), int(lengths.sum()), self._geometry.wave
        even = total / wave
        whole = longest if n_rows <= wave else max(longest, even + total / n_rows / 2)
        return whole > even + max(total / self._n_cuts(n_rows), _MIN_CHUNK) / 2 + _SPLIT_COST

    def _n_cuts(self, n_rows: int) -> int:
        """Items that cutting may add: as many as run at a time, or so many that they share out evenly."""
        wave = self._geometry.wave
        return wave - n_rows if 2 * n_rows <= wave else 4 * wave

    def _n_items(self, n_rows: int, variant: Variant) -> int:
        """Items launched, enough for any lengths: each row's last, each shared tile's last, and what cuts add."""
        if variant == "whole":
            return n_rows
        n_shared = self._max_tiles(n_rows)[0] if variant == "shared" else 0
        return n_rows + n_shared + self._n_cuts(n_rows)

    def _n_large_items(self, n_rows: int) -> int:
        return self._max_tiles(n_rows)[1] + 2 * self._geometry.wave

    def _max_tiles(self, n_rows: int) -> tuple[int, int]:
        """Small and large tiles that shared runs may fill."""
        return max(n_rows // 4, 1), max(2 * n_rows * self._geometry.group // self._geometry.large_tile, 1)

    def _cut(self, spans: Spans, n_cuts: int, min_tokens: int, first_result: int) -> Items:
        """Items of equal size, at most ``n_cuts`` more than spans; what is left of a span is a smaller one."""
        page_size = self._geometry.page_size
        chunk_pages = max(-(-int(spans.n_pages.sum()) // n_cuts), -(-min_tokens // page_size))
        return spans.cut(chunk_pages, page_size, first_result)

    def _spans(self, slots: Ints, lengths: Ints, width: int, sharing: Sharing | None) -> tuple[Spans, Spans]:
        """What small tiles read: rows' own pages and those of few rows; and what large tiles do."""
        page_size, group = self._geometry.page_size, self._geometry.group
        covered = np.zeros_like(lengths) if sharing is None else sharing.covered_pages
        rows = np.arange(len(slots), dtype=np.int32)
        own = Spans(
            first_queries=rows,
            n_queries=np.ones_like(rows),
            first_entries=slots * np.int32(width) + covered,
            n_pages=-(-lengths // page_size) - covered,
            last_page_lens=(lengths - 1) % page_size + 1,
        )
        runs = () if sharing is None else sharing.runs
        tiles: dict[bool, list[tuple[int, int, int, int, int]]] = {False: [], True: []}
        for run in runs:
            size = (self._geometry.large_tile if run.is_large else self._geometry.small_tile) // group
            first_entry = int(slots[run.first_row]) * width + run.first_page
            end = run.first_row + run.n_rows
            tiles[run.is_large] += [
                (first, min(size, end - first), first_entry, run.n_pages, page_size)
                for first in range(run.first_row, end, size)
            ]
        small, large = (np.array(tiles[is_large], dtype=np.int32).reshape(-1, 5).T for is_large in (False, True))
        return Spans.joined(own, Spans(*small)), Spans(*large)

    def _part_tokens(self, lengths: Ints, window: int | None) -> int:
        """Positions of a part, whole tiles of them, so that cutting adds no more items than it may."""
        reads = lengths if window is None else np.minimum(lengths, window)
        parts = self._n_cuts(len(lengths)) * _MIN_CHUNK
        return -(-int(reads.sum()) // parts) * _MIN_CHUNK

    def _rows_in_parts(
        self, slots: Ints, lengths: Ints, width: int, window: int | None, part_tokens: int
    ) -> tuple[Items, Ints]:
        """Each row's items, which FlashInfer cuts, the longest first; and where each row's results are."""
        page_size = self._geometry.page_size
        firsts, reads = np.zeros_like(lengths), lengths
        if window is not None:
            firsts, reads = np.maximum(lengths - window, 0) // page_size, np.minimum(lengths, window)
        indptr = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(-(-reads // part_tokens), out=indptr[1:])
        rows = np.repeat(np.arange(len(slots), dtype=np.int32), np.diff(indptr))
        results = indptr[rows]
        parts = np.arange(len(rows), dtype=np.int32) - results
        items = Items(
            first_queries=rows,
            n_queries=np.ones_like(rows),
            first_entries=slots[rows] * np.int32(width) + firsts[rows],
            n_pages=(-(-lengths // page_size) - firsts)[rows],
            last_page_lens=((lengths - 1) % page_size + 1)[rows],
            results=results,
            parts=parts,
        )
        return items.take(np.argsort(parts * part_tokens - reads[rows], kind="stable")), indptr
