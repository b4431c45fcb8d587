"""A step's rows on the device: the staged numbers, the block tables, and the token that each slot sampled last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from radixkv.runtime.device.ops.cuda.token_inputs import place_tokens, update_tables
from radixkv.runtime.device.pack_cuda import PackedStep
from radixkv.runtime.device.staging_cuda import Layout, Staged, Staging

_UPDATES_A_ROW = 4
"""Staged entries of block tables, a row: one that continues an answer has mostly none, and hardly ever two."""


@dataclass(frozen=True)
class Places:
    """Where a step's tokens stand; int32, [tokens] each."""

    ids: Tensor
    positions: Tensor
    """In the token's own sequence."""
    slot_mapping: Tensor
    """Where in the pool its K and V go, seen as [pages * page_size]; -1 for nowhere."""

    def first(self, n_tokens: int) -> Places:
        """The same without the tokens behind."""
        return Places(self.ids[:n_tokens], self.positions[:n_tokens], self.slot_mapping[:n_tokens])


class RowFields:
    """The rows' places in a layout. What pads a batch is rows of the slot behind the last one; they write nothing.

    Args:
        max_rows: rows a step, and slots.
        layout: gets the fields.
    """

    def __init__(self, max_rows: int, layout: Layout) -> None:
        self.max_rows = max_rows
        self.batch_slots = layout.field(max_rows)
        self.starts = layout.field(max_rows)
        self.n_tokens = layout.field(max_rows)
        self.firsts = layout.field(max_rows)
        self.write_starts = layout.field(max_rows)
        self.table_starts = layout.field(max_rows)
        self.update_firsts = layout.field(max_rows)
        self.update_counts = layout.field(max_rows)
        self.ids = layout.field(max_rows)
        self.updates = layout.field(_UPDATES_A_ROW * max_rows)

    def fill(self, staged: Staged, step: PackedStep, n_padded: int) -> None:
        """The rows, then padding up to ``n_padded``; but neither ids nor updates."""
        self.pad(staged, step.n_rows, n_padded)
        for field, values in (
            (self.batch_slots, step.batch_slots),
            (self.starts, step.starts),
            (self.n_tokens, step.n_tokens),
            (self.firsts, step.firsts),
            (self.write_starts, step.write_starts),
            (self.table_starts, step.table_starts),
            (self.update_firsts, step.update_firsts),
            (self.update_counts, step.update_counts),
        ):
            staged[field][: step.n_rows] = values

    def pad(self, staged: Staged, first: int, end: int) -> None:
        """Rows ``first .. end - 1`` are padding."""
        for field, value in (
            (self.batch_slots, self.max_rows),
            (self.starts, 0),
            (self.n_tokens, 1),
            (self.write_starts, 1),
            (self.table_starts, 0),
            (self.update_firsts, 0),
            (self.update_counts, 0),
            (self.ids, 0),
        ):
            staged[field][first:end] = value
        staged[self.firsts][first:end] = np.arange(first, end)

    def fits(self, step: PackedStep) -> bool:
        """Whether the step has one token a row, and few enough updates to be staged."""
        return step.n_decode == step.n_rows and len(step.updates) <= self.updates.size

    def fill_decode(self, staged: Staged, step: PackedStep, n_padded: int) -> None:
        """All of a step that ``fits``."""
        self.fill(staged, step, n_padded)
        staged[self.ids][: step.n_rows] = step.ids
        staged[self.updates][: len(step.updates)] = step.updates


class RowState:
    """What the device keeps of its slots from step to step.

    Memory: ``4 * (max_rows + 1) * width`` bytes.

    Args:
        width: entries of a block table.
        zero_page: what an unknown entry holds.
        page_size: tokens a page.
        n_kept: most tokens of a step whose places stay in the same memory; ``max_rows`` if that is more.
    """

    def __init__(
        self,
        fields: RowFields,
        staging: Staging,
        *,
        width: int,
        zero_page: int,
        page_size: int,
        n_kept: int,
        device: torch.device,
    ) -> None:
        n_batch_slots = fields.max_rows + 1
        self.tables = torch.full((n_batch_slots, width), zero_page, dtype=torch.int32, device=device)
        """[slots + 1, width]"""
        self.last_tokens = torch.zeros(n_batch_slots, dtype=torch.int32, device=device)
        """[slots + 1]"""
        self._fields = fields
        self._staging = staging
        self._page_size = page_size
        self._places = Places(*torch.zeros(3, max(n_kept, fields.max_rows), dtype=torch.int32, device=device))
        self._places.slot_mapping.fill_(-1)

    def batch_slots(self, n_rows: int) -> Tensor:
        """[n_rows] int32: the staged rows' slots."""
        return self._staging.view(self._fields.batch_slots)[:n_rows]

    def update(self, n_rows: int, updates: Tensor | None = None) -> None:
        """Brings the staged rows' tables up to date; ``updates`` [n] int32, None for the staged ones."""
        fields, view = self._fields, self._staging.view
        update_tables(
            self.tables,
            self.batch_slots(n_rows),
            view(fields.table_starts)[:n_rows],
            view(fields.update_firsts)[:n_rows],
            view(fields.update_counts)[:n_rows],
            view(fields.updates) if updates is None else updates,
        )

    def kept(self, n_tokens: int) -> Places:
        """Memory that stays where it is. It always holds places that can be read, if of another step."""
        return self._places.first(n_tokens)

    def place_decode(self, n_rows: int) -> Places:
        """The staged rows' tokens, one a row, in ``kept``."""
        places = self.kept(n_rows)
        self._place(n_rows, self._staging.view(self._fields.ids)[:n_rows], 1, places)
        return places

    def place_kept(self, n_rows: int, ids: Tensor, max_n_tokens: int, n_padded: int) -> None:
        """As ``place``, but in ``kept``; the tokens behind, up to ``n_padded``, are written nowhere."""
        self._places.slot_mapping[len(ids) : n_padded].fill_(-1)
        self._place(n_rows, ids, max_n_tokens, self.kept(len(ids)))

    def place(self, n_rows: int, ids: Tensor, max_n_tokens: int) -> Places:
        """The staged rows' tokens.

        Args:
            ids: [tokens] int32, -1 for a slot's last token.
            max_n_tokens: of the longest row.
        """
        places = Places(*torch.empty(3, len(ids), dtype=torch.int32, device=ids.device))
        self._place(n_rows, ids, max_n_tokens, places)
        return places

    def _place(self, n_rows: int, ids: Tensor, max_n_tokens: int, places: Places) -> None:
        fields, view = self._fields, self._staging.view
        place_tokens(
            self.tables,
            self.last_tokens,
            self.batch_slots(n_rows),
            view(fields.starts)[:n_rows],
            view(fields.n_tokens)[:n_rows],
            view(fields.firsts)[:n_rows],
            view(fields.write_starts)[:n_rows],
            ids,
            page_size=self._page_size,
            max_n_tokens=max_n_tokens,
            ids_out=places.ids,
            positions_out=places.positions,
            slot_mapping_out=places.slot_mapping,
        )
