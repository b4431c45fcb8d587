"""Changes of window block tables, as a ``StepPlan`` has them, as arrays."""

from __future__ import annotations

from itertools import accumulate
from typing import Generic, NamedTuple

import numpy as np

from radixkv.runtime.device.pack import ArrayT, Ints
from radixkv.runtime.step.plan import StepPlan


class TableChanges(NamedTuple, Generic[ArrayT]):
    """Changes of block tables: int32 arrays on the host or tensors on the device, with one element per table."""

    batch_slots: ArrayT
    table_starts: ArrayT
    """First entry that is replaced."""
    update_firsts: ArrayT
    """Index in the updates at which the table's pages begin."""
    update_counts: ArrayT
    """Entries that are replaced."""


def window_changes(plan: StepPlan) -> tuple[TableChanges[Ints], Ints]:
    """Returns the tables that a plan changes, and their new entries, table after table. O(rows + changed pages)."""
    rows = [row for row in plan.rows if row.window_pages]
    counts = [len(row.window_pages) for row in rows]
    columns = (
        [row.batch_slot for row in rows],
        [row.window_start for row in rows],
        list(accumulate(counts, initial=0))[:-1],
        counts,
    )
    pages = [page for row in rows for page in row.window_pages]
    return TableChanges(*np.array(columns, np.int32)), np.array(pages, np.int32)
