"""State of the batch slots that stays on the GPU between steps: block tables and last sampled tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from radixkv.runtime.device.cuda.table_updates import send_updates
from radixkv.runtime.device.cuda.window_tables import WindowTables
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.memory.cuda.staging import Staging, StagingBuffer, StagingLayout
from radixkv.runtime.device.ops.base import BlockArrays, DeviceSequences, TokenInputs
from radixkv.runtime.device.ops.cuda.token_inputs import prepare_token_inputs, update_tables
from radixkv.runtime.device.pack import Ints, PackedStep, RowArrays
from radixkv.runtime.device.window_changes import TableChanges
from radixkv.runtime.step.plan import StepPlan

_UPDATES_A_ROW = 4
"""Staged block table entries per row: a decode row mostly has none, and hardly ever two."""
_N_ARRAYS = len(RowArrays._fields)
_ALIGNMENT = 4
"""Each array of the staged rows begins at a multiple of these elements, 16 bytes."""


class RowFields:
    """The staging fields of a step's rows.

    Padding rows use the batch slot after the last real one, and store nothing.

    Args:
        max_rows: most rows of a step, and number of batch slots.
        layout: the fields are added to it.
    """

    def __init__(self, max_rows: int, layout: StagingLayout) -> None:
        self.max_rows = max_rows
        self._rows = layout.field(_N_ARRAYS * -(-max_rows // _ALIGNMENT) * _ALIGNMENT)
        self.ids = layout.field(max_rows)
        self.updates = layout.field(_UPDATES_A_ROW * max_rows)

    def view(self, staging: Staging) -> RowArrays[Tensor]:
        """Returns the staged rows on the device: [max_rows, or more] each, at fixed addresses."""
        return RowArrays(*staging.view(self._rows).view(_N_ARRAYS, -1))

    def fill(self, staged: StagingBuffer, step: PackedStep, n_padded: int) -> None:
        """Fills in the rows, then padding rows up to ``n_padded``; leaves the rows' ids and table updates alone."""
        self.pad(staged, step.n_rows, n_padded)
        staged[self._rows].reshape(_N_ARRAYS, -1)[:, : step.n_rows] = step.rows

    def pad(self, staged: StagingBuffer, first: int, end: int) -> None:
        """Fills rows ``first .. end - 1`` with padding."""
        arrays: RowArrays[Ints] = RowArrays(*staged[self._rows].reshape(_N_ARRAYS, -1)[:, first:end])
        for array in arrays:
            array[:] = 0
        arrays.batch_slots[:] = arrays.sampled_slots[:] = self.max_rows
        arrays.n_tokens[:] = arrays.write_starts[:] = 1
        arrays.firsts[:] = np.arange(first, end)
        staged[self.ids][first:end] = 0

    def fits_updates(self, step: PackedStep) -> bool:
        """Whether the step has few enough table updates for their staging field."""
        return len(step.updates) <= self.updates.size

    def fill_decode(self, staged: StagingBuffer, step: PackedStep, n_padded: int) -> None:
        """Fills in everything of a step of decode rows for which ``fits_updates`` holds."""
        self.fill(staged, step, n_padded)
        staged[self.ids][: step.n_rows] = step.ids
        staged[self.updates][: len(step.updates)] = step.updates


class PersistentBatch:
    """Block tables and last sampled tokens of the batch slots, kept on the device from step to step.

    Memory: ``4 * (max_rows + 1) * width`` bytes for the tables, and a few vectors.

    Args:
        fields: the staging fields of a step's rows.
        staging: device side of these fields.
        settings: sizes of pages and sequences.
        zero_page: initial value of block table entries.
        page_pitch: tokens from the beginning of one page of a layer to that of the next.
        windows: the window block tables; None: all layers are in all pages.
        max_static_tokens: capacity of the token inputs at fixed addresses; at least ``max_rows`` is allocated.
    """

    def __init__(
        self,
        fields: RowFields,
        staging: Staging,
        settings: DeviceSettings,
        *,
        zero_page: int,
        page_pitch: int,
        windows: WindowTables | None,
        max_static_tokens: int,
    ) -> None:
        device, width = staging.device, -(-settings.max_model_len // settings.page_size)
        n_batch_slots = fields.max_rows + 1
        self.tables = torch.full((n_batch_slots, width), zero_page, dtype=torch.int32, device=device)
        """[batch slots + 1, width] int32: page ids; the last row is for padding."""
        self.last_tokens = torch.zeros(n_batch_slots, dtype=torch.int32, device=device)
        """[batch slots + 1] int32: the token that each batch slot sampled last."""
        self._fields = fields
        self._staging = staging
        self._staged_rows = fields.view(staging)
        self._page_size = settings.page_size
        self._page_pitch = page_pitch
        self._windows = windows
        self._static_inputs = self._new_inputs(max(max_static_tokens, fields.max_rows), device)
        for inputs in (self._static_inputs, self._static_inputs.in_windows):
            if inputs is not None:
                inputs.ids.zero_()
                inputs.positions.zero_()
                inputs.slot_mapping.fill_(-1)

    def sampled_slots(self, n_rows: int) -> Tensor:
        """[n_rows] int32: the batch slot that keeps each staged row's sampled token."""
        return self._staged_rows.sampled_slots[:n_rows]

    def update(self, n_rows: int, updates: Tensor | None = None) -> None:
        """Applies block table updates of the staged rows; ``updates`` is [n] int32 page ids, None for the staged
        ones."""
        staged = self._staging.view(self._fields.updates)
        update_tables(self.tables, self._rows(n_rows), staged if updates is None else updates)

    def update_ahead(self, step: PackedStep) -> None:
        """Applies the block table updates of a step, of any number, before its rows are staged. O(rows +
        updates)."""
        rows = step.rows
        changed = np.flatnonzero(rows.update_counts)
        columns = (rows.batch_slots, rows.table_starts, rows.update_firsts, rows.update_counts)
        changes: TableChanges[Ints] = TableChanges(*(column[changed] for column in columns))
        send_updates(self.tables, changes, step.updates)

    def update_windows(self, plan: StepPlan) -> None:
        """Applies the changes that a plan has of window block tables, if there are such."""
        if self._windows is not None:
            self._windows.update(plan)

    def update_staged(self, n_rows: int) -> None:
        """Applies the staged updates of all block tables of the staged rows."""
        self.update(n_rows)
        if self._windows is not None:
            self._windows.update_staged(n_rows)

    def static_inputs(self, n_tokens: int) -> TokenInputs:
        """Returns token inputs at fixed addresses. They always hold valid values, perhaps of an earlier step."""
        return self._static_inputs.first(n_tokens)

    def sequences(self, n_decode: int, prompts: BlockArrays[Tensor] | None = None) -> DeviceSequences:
        """Returns the staged rows, for layers that have states: decode rows, then those of ``prompts``."""
        batch_slots, starts = self._staged_rows.batch_slots[:n_decode], self._staged_rows.starts[:n_decode]
        return DeviceSequences(self._fields.max_rows, batch_slots, starts, prompts)

    def prepare_decode(self, n_rows: int) -> TokenInputs:
        """Computes inputs of the staged decode rows, one token each, into ``static_inputs``."""
        inputs = replace(self.static_inputs(n_rows), sequences=self.sequences(n_rows))
        self._prepare(n_rows, self._staging.view(self._fields.ids)[:n_rows], 1, inputs)
        return inputs

    def prepare_static(self, n_rows: int, ids: Tensor, max_n_tokens: int, n_padded: int) -> None:
        """Computes inputs of the staged rows' tokens into ``static_inputs``.

        Padding tokens after them, up to ``n_padded``, store no K and V.
        """
        for inputs in (self._static_inputs, self._static_inputs.in_windows):
            if inputs is not None:
                inputs.slot_mapping[len(ids) : n_padded].fill_(-1)
        self._prepare(n_rows, ids, max_n_tokens, self.static_inputs(len(ids)))

    def prepare(self, n_rows: int, ids: Tensor, max_n_tokens: int) -> TokenInputs:
        """Computes the inputs of the staged rows' tokens.

        Args:
            n_rows: staged rows.
            ids: [tokens] int32, -1 for the token that the batch slot sampled last.
            max_n_tokens: tokens of the longest row.
        """
        inputs = self._new_inputs(len(ids), ids.device)
        self._prepare(n_rows, ids, max_n_tokens, inputs)
        return inputs

    def _new_inputs(self, n_tokens: int, device: torch.device) -> TokenInputs:
        """Allocates inputs of ``n_tokens`` tokens."""
        n_arrays = 3 if self._windows is None else 4
        ids, positions, *slots = torch.empty(n_arrays, n_tokens, dtype=torch.int32, device=device)
        inputs = TokenInputs(ids, positions, slots[0])
        if self._windows is None:
            return inputs
        return replace(inputs, in_windows=TokenInputs(ids, positions, slots[1]))

    def _prepare(self, n_rows: int, ids: Tensor, max_n_tokens: int, inputs: TokenInputs) -> None:
        prepare_token_inputs(
            self.tables,
            self.last_tokens,
            self._rows(n_rows),
            ids,
            inputs,
            page_size=self._page_size,
            max_n_tokens=max_n_tokens,
            page_pitch=self._page_pitch,
            windows=None if self._windows is None else self._windows.places,
        )

    def _rows(self, n_rows: int) -> RowArrays[Tensor]:
        # A view takes a microsecond, and kernels read the number of rows from the first array only.
        return self._staged_rows._replace(batch_slots=self._staged_rows.batch_slots[:n_rows])
