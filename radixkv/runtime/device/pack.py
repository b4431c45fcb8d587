"""Conversion of a ``StepPlan`` to arrays: hundreds of rows are packed and checked while the previous step runs."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from operator import and_
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import DeviceError
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.window_entries import WindowEntries
from radixkv.runtime.step.plan import Row, Scoring, StepPlan
from radixkv.runtime.step.window_pool import WindowPool

Ints = NDArray[np.int32]
ArrayT = TypeVar("ArrayT")

_LAST_TOKEN = np.int32(-1).tobytes()
"""The id -1, which stands for the token that the batch slot sampled last."""


class RowArrays(NamedTuple, Generic[ArrayT]):
    """The rows of a step: int32 arrays on the host or tensors on the device, with one element per row."""

    batch_slots: ArrayT
    starts: ArrayT
    """Place of each row's first token among those whose K and V it reads: its position, less ``n_skipped``."""
    n_tokens: ArrayT
    firsts: ArrayT
    """Index of each row's first token among the step's tokens."""
    write_starts: ArrayT
    """Tokens at places below these store no K and V."""
    table_starts: ArrayT
    """First block table entry that each row replaces."""
    update_firsts: ArrayT
    """Index in the step's updates at which each row's pages begin."""
    update_counts: ArrayT
    """Block table entries that each row replaces."""
    sampled_slots: ArrayT
    """Batch slot that keeps each row's sampled token; the padding's for a row without a sampled position."""
    n_skipped: ArrayT
    """Tokens of skipped pages before each row's first token."""


@dataclass(frozen=True)
class PackedStep:
    """One step as int32 arrays.

    Its rows are those of the plan, or one for each token of some: see ``split``.
    """

    plan: StepPlan
    rows: RowArrays[Ints]
    ids: Ints
    """[tokens]; -1 stands for the token that the batch slot sampled last."""
    updates: Ints
    """[all entries to replace]: page ids, row after row."""
    n_decode: int = 0
    """Leading rows that attention computes as decode rows: of one token, before ``split`` also its drafts."""
    n_drafts: Ints | None = None
    """[rows]: drafts of each row; None if no row has any."""
    counts: Ints | None = None
    """[rows of the plan that were split]: rows of each; None: one each."""
    results: Ints | None = None
    """[sampled positions]: the row of each; None: each row has one, or the step is not split."""

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.rows.batch_slots)

    @property
    def sampled(self) -> Ints:
        """[sampled positions]: index of each among the step's tokens, row after row."""
        lasts = self.rows.firsts + self.rows.n_tokens - 1
        if self.n_drafts is None:
            return lasts
        return np.concatenate([np.arange(last - n, last + 1) for last, n in zip(lasts, self.n_drafts, strict=True)])

    @property
    def lengths(self) -> Ints:
        """[rows]: tokens that each row's last token attends to, itself included."""
        return self.rows.starts + self.rows.n_tokens

    def without_updates(self) -> PackedStep:
        """Returns the step without changes of block tables. O(rows)."""
        rows = self.rows._replace(update_counts=np.zeros_like(self.rows.update_counts))
        return replace(self, rows=rows, updates=self.updates[:0])

    def split(self, n_split: int, padding_slot: int) -> PackedStep:
        """Returns the step with a row of one token for each token of its first ``n_split`` rows, the decode rows at
        least.

        Rows of one token follow each other, with the same batch slot. O(rows of the result).

        Args:
            n_split: rows to split.
            padding_slot: batch slot of no request.
        """
        counts = np.where(np.arange(self.n_rows) < n_split, self.rows.n_tokens, 1)
        firsts, n_rows = _firsts(counts), int(counts.sum())
        sources = np.arange(self.n_rows).repeat(counts)
        offsets = np.arange(n_rows, dtype=np.int32) - firsts[sources]
        rows: RowArrays[Ints] = RowArrays(*np.array(self.rows)[:, sources])
        np.add(rows.starts, offsets, out=rows.starts)
        np.add(rows.firsts, offsets, out=rows.firsts)
        rows.n_tokens[counts[sources] > 1] = 1
        rows.update_counts[offsets > 0] = 0
        n_decode = int(counts[:n_split].sum())
        split_counts = counts[:n_split] if n_decode > n_split else None
        step = PackedStep(self.plan, rows, self.ids, self.updates, n_decode, counts=split_counts)
        n_unsampled = counts - 1 - (0 if self.n_drafts is None else self.n_drafts)
        is_sampled = offsets >= n_unsampled[sources]
        if is_sampled.all():
            return step
        rows.sampled_slots[~is_sampled] = padding_slot
        return replace(step, results=np.flatnonzero(is_sampled).astype(np.int32))


class Packer:
    """Packs and checks plans, and tracks how many entries of each batch slot's block table are set.

    A plan that does not fit is refused before any of it reaches the device, where it could overwrite other memory.
    O(rows + tokens + changed pages), vectorised.

    Args:
        settings: sizes of pages, rows and sequences.
        n_pages: pages of the pool.
        max_tokens: most tokens of a step; None: any number.
        count_split: returns how many leading rows of a step are split into rows of one token, its decode rows at
            least; None: rows are not split.
        adapters: digests of the adapters that rows may ask for; they may change between plans.
    """

    def __init__(
        self,
        settings: DeviceSettings,
        n_pages: int,
        max_tokens: int | None,
        *,
        count_split: Callable[[PackedStep], int] | None = None,
        adapters: Container[str] = frozenset(),
    ) -> None:
        self._settings = settings
        self._adapters = adapters
        self._count_split = count_split
        self._n_pages = n_pages
        self._max_tokens = max_tokens
        self.width = -(-settings.max_model_len // settings.page_size)
        """Entries per block table."""
        self._table_ends = np.zeros(settings.max_num_seqs, dtype=np.int32)

    def window_entries(self, pool: WindowPool) -> WindowEntries:
        """Returns what checks the window block tables of the same sizes."""
        settings = self._settings
        return WindowEntries(pool, max_rows=settings.max_num_seqs, width=self.width, page_size=settings.page_size)

    def pack(self, plan: StepPlan) -> PackedStep:
        """Returns the plan as arrays. Raises ``DeviceError`` and changes nothing if the plan does not fit."""
        _check_plan(plan, self._settings.max_num_seqs, self._n_pages)
        self._check_adapters(plan)
        if self._count_split is not None and len(plan.rows) + plan.n_drafts > self._settings.max_num_seqs:
            raise DeviceError(
                f"step {plan.step} has {len(plan.rows)} rows and {plan.n_drafts} drafts, each a row to the device, "
                f"which takes {self._settings.max_num_seqs}"
            )
        row_values = np.array([_row_values(row) for row in plan.rows], dtype=np.int32).T.copy()
        batch_slots, starts, n_tokens, write_starts, table_starts, update_counts, n_ids, n_drafts, n_skipped = (
            row_values
        )
        n_skipped *= self._settings.page_size
        starts -= n_skipped
        write_starts -= n_skipped
        updates = np.fromiter(chain.from_iterable(row.table_pages for row in plan.rows), dtype=np.int32)
        ids = b"".join([_LAST_TOKEN if row.tokens is None else row.tokens for row in plan.rows])
        firsts, update_firsts = _firsts(n_tokens), _firsts(update_counts)
        rows = RowArrays(
            batch_slots,
            starts,
            n_tokens,
            firsts,
            write_starts,
            table_starts,
            update_firsts,
            update_counts,
            batch_slots,
            n_skipped,
        )
        packed_ids = np.frombuffer(ids, dtype="<i4") if len(ids) % 4 == 0 else np.empty(0, np.int32)
        step = PackedStep(plan, rows, packed_ids, updates, plan.n_decode, n_drafts if plan.n_drafts else None)
        self._check(step, n_ids)
        if self._count_split is None:
            return step
        n_split = self._count_split(step)
        if not plan.n_drafts and n_split == plan.n_decode:
            return step
        return step.split(n_split, self._settings.max_num_seqs)

    def _check_adapters(self, plan: StepPlan) -> None:
        """Raises ``DeviceError`` if a row has an adapter that the device has not. O(rows)."""
        for row in plan.rows:
            if row.adapter and row.adapter not in self._adapters:
                raise DeviceError(
                    f"step {plan.step}, batch slot {row.batch_slot}: the device has no adapter {row.adapter[:12]}"
                )

    def _check(self, step: PackedStep, n_id_bytes: Ints) -> None:
        rows, n_rows, n_decode, n_ids = step.rows, step.n_rows, step.n_decode, len(step.ids)
        page_size, max_model_len = self._settings.page_size, self._settings.max_model_len
        ends, table_ends = step.lengths, rows.table_starts + rows.update_counts
        outside = step.updates[(step.updates < 0) | (step.updates >= self._n_pages)]
        known = self._table_ends[rows.batch_slots]
        replaces = rows.update_counts > 0
        new_known = np.where(replaces, table_ends, known)
        conditions: list[tuple[NDArray[np.bool_] | bool, str]] = [
            ((rows.n_tokens >= 1) & (rows.starts >= 0), "a row has no tokens, or a start below 0"),
            (0 <= n_decode <= n_rows, f"{n_decode} decode rows of {n_rows} rows"),
            (
                (rows.n_tokens - (0 if step.n_drafts is None else step.n_drafts) == 1)
                | (np.arange(n_rows) >= n_decode),
                "a decode row computes one token, and its drafts",
            ),
            (step.n_drafts is None or not step.n_drafts[n_decode:].any(), "a row of a prompt has drafts"),
            (rows.n_skipped >= 0, "a row skips fewer than 0 pages"),
            (n_id_bytes == 4 * rows.n_tokens, "a row needs as many ids as it has tokens"),
            (
                self._max_tokens is None or n_ids <= self._max_tokens,
                f"{n_ids} tokens; the device takes {self._max_tokens}",
            ),
            (ends + rows.n_skipped <= max_model_len, f"a position beyond max_model_len {max_model_len}"),
            ((rows.table_starts >= 0) & (table_ends <= self.width), f"table entries beyond {self.width}"),
            (not len(outside), f"pages {outside.tolist()} of a pool of {self._n_pages}"),
            (~replaces | (rows.table_starts <= known), "an update leaves a hole in the block table"),
            (-(-ends // page_size) <= new_known, "no page is known for some positions"),
        ]
        if not np.all(reduce(and_, [holds for holds, _ in conditions])):  # quicker than one after another
            holds, problem = next(condition for condition in conditions if not np.all(condition[0]))
            where = f", row {np.flatnonzero(~np.asarray(holds))[0]}" if np.ndim(holds) else ""
            raise DeviceError(f"step {step.plan.step}{where}: {problem}")
        self._table_ends[rows.batch_slots] = new_known


def _row_values(row: Row) -> tuple[int, int, int, int, int, int, int, int, int]:
    n_id_bytes = 4 * row.n_tokens if row.tokens is None and row.n_tokens == 1 else len(row.tokens or b"")
    return (
        row.batch_slot,
        row.start,
        row.n_tokens,
        row.write_start,
        row.table_start,
        len(row.table_pages),
        n_id_bytes,
        row.n_drafts,
        row.n_skipped,
    )


def _firsts(counts: Ints) -> Ints:
    firsts = np.zeros(len(counts), dtype=np.int32)
    np.cumsum(counts[:-1], out=firsts[1:])
    return firsts


def _check_plan(plan: StepPlan, n_batch_slots: int, n_pages: int) -> None:
    """Checks that rows fit the batch slots, page copies the pool, and prompt logprobs their rows.

    O(rows + copies). Raises ``DeviceError``.
    """
    if not 1 <= len(plan.rows) <= n_batch_slots:
        raise DeviceError(f"step {plan.step} has {len(plan.rows)} rows; the device takes 1 to {n_batch_slots}")
    batch_slots = [row.batch_slot for row in plan.rows]
    for batch_slot in batch_slots:
        if not 0 <= batch_slot < n_batch_slots:
            raise DeviceError(
                f"step {plan.step}, batch slot {batch_slot}: the device has {n_batch_slots} batch slots"
            )
    if len(set(batch_slots)) < len(batch_slots):
        twice = next(batch_slot for batch_slot in batch_slots if batch_slots.count(batch_slot) > 1)
        raise DeviceError(f"step {plan.step}: two rows have batch slot {twice}")
    scored = plan.scored_pages()
    if scored and not 0 <= min(scored) <= max(scored) < n_pages:
        raise DeviceError(f"step {plan.step} scores pages {min(scored)} to {max(scored)} of a pool of {n_pages}")
    pages = [page for pair in plan.copies for page in pair]
    if pages and not 0 <= min(pages) <= max(pages) < n_pages:
        raise DeviceError(f"step {plan.step} copies pages {min(pages)} to {max(pages)} of a pool of {n_pages}")
    if len({destination for _, destination in plan.copies}) < len(plan.copies):
        raise DeviceError(f"step {plan.step} copies several pages to the same destination")
    for row in plan.rows:
        if row.scoring is not None:
            _check_scoring(plan.step, row, row.scoring)


def _check_scoring(step: int, row: Row, scoring: Scoring) -> None:
    where = f"step {step}, batch slot {row.batch_slot}"
    n_targets = len(scoring.targets) / 4  # int32
    if n_targets not in (row.n_tokens, row.n_tokens - 1):
        raise DeviceError(f"{where}: prompt logprobs of {n_targets:g} tokens in a row of {row.n_tokens}")
    if scoring.n_logprobs < 0:
        raise DeviceError(f"{where}: n_logprobs {scoring.n_logprobs}")
