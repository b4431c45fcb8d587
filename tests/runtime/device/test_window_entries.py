"""Plans whose rows lack window pages."""

from __future__ import annotations

import msgspec
import pytest

from radixkv.errors import DeviceError, InvariantError
from radixkv.runtime.device.window_entries import WindowEntries
from radixkv.runtime.step.plan import Row, StepPlan
from radixkv.runtime.step.window_pool import WindowPool
from support.device_support import row_of

POOL = WindowPool(window=4, pages_per_slab=2, n_slabs=8, n_window_slabs=4)
PAGE_SIZE = 2


def entries_of(pool: WindowPool = POOL, *, width: int = 12) -> WindowEntries:
    return WindowEntries(pool, max_rows=6, width=width, page_size=PAGE_SIZE)


def row(slot: int, start: int, n_tokens: int, first: int = 0, pages: tuple[int, ...] = ()) -> Row:
    one = row_of([1] * (start + n_tokens), [0], start=start)
    return msgspec.structs.replace(one, batch_slot=slot, window_start=first, window_pages=pages)


def plan_of(*rows: Row, copies: tuple[tuple[int, int], ...] = ()) -> StepPlan:
    return StepPlan(0, rows, window_copies=copies)


def test_pages_and_entries_beyond_are_refused() -> None:
    plan = plan_of(row(3, 11, 2, 4, (7, 8, 11)), row(1, 23, 1, 10, (0, 1)))
    entries_of().check(plan)
    with pytest.raises(DeviceError, match="window pages 0 to 11 of a pool of 11"):
        entries_of(POOL._replace(n_window_slabs=3)).check(plan)
    with pytest.raises(DeviceError, match="batch slot 1: window table entries are beyond"):
        entries_of(width=11).check(plan)
    with pytest.raises(DeviceError, match="window pages 0 to 12"):
        entries_of().check(plan_of(*plan.rows, copies=((12, 3),)))


def test_rows_may_go_on_with_entries_that_the_device_knows() -> None:
    entries = entries_of()
    entries.check(plan_of(row(0, 0, 3, 0, (1, 2))))
    entries.check(plan_of(row(0, 3, 1)))
    entries.check(plan_of(row(0, 4, 1, 2, (3,))))


@pytest.mark.parametrize(
    "news",
    [
        pytest.param((0, ()), id="never told"),
        pytest.param((3, (5, 6)), id="without the window before"),
        pytest.param((2, (4,)), id="without the last positions"),
        pytest.param((4, (6, 7)), id="of a later entry than the batch slot has"),
    ],
)
def test_a_row_whose_window_pages_the_device_does_not_know_is_a_bug(news: tuple[int, tuple[int, ...]]) -> None:
    """It reads positions 5 to 7 and writes 8 and 9: it needs entries 2 to 4."""
    unknown = "no window pages are known for some positions of a row from 8 to 9, and the window of 4 before it"
    with pytest.raises(InvariantError, match=unknown):
        entries_of().check(plan_of(row(2, 8, 2, *news)))


def test_entries_of_an_earlier_request_in_the_batch_slot_are_not_those_of_the_next() -> None:
    entries = entries_of()
    entries.check(plan_of(row(0, 0, 8, 0, (1, 2, 3, 4))))
    with pytest.raises(InvariantError, match="a row may start at 9"):
        entries.check(plan_of(row(0, 8, 2, 3, (5, 6))))


@pytest.mark.parametrize(
    ("start", "n_tokens", "news"),
    [
        pytest.param(4, 2, (0, ()), id="no pages, where the earlier request has some"),
        pytest.param(0, 2, (0, ()), id="no pages, from the beginning"),
        pytest.param(10, 2, (4, (5, 6)), id="pages that continue the earlier ones"),
    ],
)
def test_a_row_that_does_not_continue_the_last_one_is_of_another_request(
    start: int, n_tokens: int, news: tuple[int, tuple[int, ...]]
) -> None:
    entries = entries_of()
    entries.check(plan_of(row(0, 0, 8, 0, (1, 2, 3, 4))))
    with pytest.raises(InvariantError, match="no window pages are known"):
        entries.check(plan_of(row(0, start, n_tokens, *news)))


def test_a_row_may_start_at_each_token_after_a_draft_that_was_accepted() -> None:
    for start in (3, 4, 5):
        entries = entries_of()
        with_drafts = msgspec.structs.replace(row(0, 0, 5, 0, (1, 2, 3)), n_drafts=2)
        entries.check(plan_of(with_drafts))
        entries.check(plan_of(row(0, start, 1)))
    with pytest.raises(InvariantError, match="no window pages are known"):
        entries.check(plan_of(row(0, 2, 1)))
