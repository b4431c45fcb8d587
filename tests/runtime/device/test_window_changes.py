"""Changes of window block tables in plans."""

from __future__ import annotations

import msgspec

from radixkv.runtime.device.window_changes import window_changes
from radixkv.runtime.step.plan import StepPlan
from support.device_support import row_of

ROWS = [
    msgspec.structs.replace(row_of([1, 2], [0]), batch_slot=slot, window_start=start, window_pages=pages)
    for slot, start, pages in ((3, 4, (7, 8)), (0, 0, ()), (5, 1, (2,)), (1, 9, (0, 1, 11)))
]


def test_rows_without_news_are_left_out() -> None:
    changes, pages = window_changes(StepPlan(0, tuple(ROWS)))
    assert [column.tolist() for column in changes] == [[3, 5, 1], [4, 1, 9], [0, 2, 3], [2, 1, 3]]
    assert pages.tolist() == [7, 8, 2, 0, 1, 11]
    none, no_pages = window_changes(StepPlan(0, (ROWS[1],)))
    assert [len(column) for column in (*none, no_pages)] == [0] * 5
