"""Window block tables of the batch slots, kept on the GPU from step to step."""

from __future__ import annotations

import torch
from torch import Tensor

from radixkv.runtime.device.cuda.table_updates import send_updates
from radixkv.runtime.device.memory.cuda.staging import Staging, StagingBuffer, StagingLayout
from radixkv.runtime.device.ops.cuda.token_inputs import WindowPlaces, update_tables
from radixkv.runtime.device.window_changes import TableChanges, window_changes
from radixkv.runtime.step.plan import StepPlan

_UPDATES_A_ROW = 4
"""Staged entries per row: a decode row mostly has none, and hardly ever two."""
_ALIGNMENT = 4
"""Each staged array begins at a multiple of these elements, 16 bytes."""


class WindowFields:
    """The staging fields of a step's changes of window block tables.

    Args:
        max_rows: most rows of a step, and number of batch slots.
        layout: the fields are added to it.
    """

    def __init__(self, max_rows: int, layout: StagingLayout) -> None:
        self.max_rows = max_rows
        self._changes = layout.field(len(TableChanges._fields) * -(-max_rows // _ALIGNMENT) * _ALIGNMENT)
        self.updates = layout.field(_UPDATES_A_ROW * max_rows)

    def view(self, staging: Staging) -> TableChanges[Tensor]:
        """Returns the staged changes on the device: [max_rows, or more] each, at fixed addresses."""
        return TableChanges(*staging.view(self._changes).view(len(TableChanges._fields), -1))

    def fits(self, plan: StepPlan) -> bool:
        """Whether a plan has few enough changed entries for their staging field. O(rows)."""
        return sum([len(row.window_pages) for row in plan.rows]) <= self.updates.size

    def fill(self, staged: StagingBuffer, plan: StepPlan | None) -> None:
        """Fills in the changes of a plan that ``fits``, and padding after them that changes nothing; None: padding
        alone."""
        arrays = staged[self._changes].reshape(len(TableChanges._fields), -1)
        arrays[:] = 0
        arrays[0] = self.max_rows
        if plan is not None:
            changes, pages = window_changes(plan)
            arrays[:, : len(changes.batch_slots)] = changes
            staged[self.updates][: len(pages)] = pages


class WindowTables:
    """The window page of each entry of each batch slot's block table, as far as rows read it.

    Memory: ``4 * (max_rows + 1) * width`` bytes.

    Args:
        fields: the staging fields of a step's changes.
        staging: device side of these fields.
        width: entries per block table.
        zero_page: initial value of the entries; those of padding keep it.
        page_pitch: tokens from the beginning of one window page of a layer to that of the next.
    """

    def __init__(
        self, fields: WindowFields, staging: Staging, *, width: int, zero_page: int, page_pitch: int
    ) -> None:
        self._fields = fields
        self._staging = staging
        self._staged = fields.view(staging)
        self.tables = torch.full((fields.max_rows + 1, width), zero_page, dtype=torch.int32, device=staging.device)
        """[batch slots + 1, width] int32: window pages; the last row is for padding."""
        self.places = WindowPlaces(self.tables, page_pitch)
        """Where K and V of a token are stored."""

    def update(self, plan: StepPlan) -> None:
        """Applies the changes of a plan, of any number."""
        changes, pages = window_changes(plan)
        if len(pages):
            send_updates(self.tables, changes, pages)

    def update_staged(self, n_rows: int) -> None:
        """Applies the staged changes, of at most ``n_rows`` tables."""
        changes = self._staged._replace(batch_slots=self._staged.batch_slots[:n_rows])
        update_tables(self.tables, changes, self._staging.view(self._fields.updates))
