"""The entries of window block tables that a device knows, tracked on the host."""

from __future__ import annotations

from radixkv.errors import DeviceError, InvariantError
from radixkv.runtime.step.plan import Row, StepPlan
from radixkv.runtime.step.window_pool import WindowPool


class WindowEntries:
    """Checks that layers with windows have a page for each position that a row reads or writes.

    An entry that the device does not know names a page of zeros, or one that the batch slot had for an earlier
    request: K and V would be written there. A row that does not begin where the last one of its batch slot ended,
    or among that one's drafts, is of a new request, and so is a change that does not continue the batch slot's
    entries: it does not have the entries before. A new request that happens to begin there is not noticed.

    Args:
        pool: whose window pages these are.
        max_rows: number of batch slots.
        width: entries of a window block table.
        page_size: tokens per page.
    """

    def __init__(self, pool: WindowPool, *, max_rows: int, width: int, page_size: int) -> None:
        self._window = pool.window
        self._n_pages = pool.n_slabs + pool.n_window_slabs
        self._width = width
        self._page_size = page_size
        self._ends = [0] * max_rows
        """By batch slot, the entry after the last one."""
        self._first_starts = [0] * max_rows
        """By batch slot, the first position at which a row may start: the window before it has known pages."""
        self._end_positions = [0] * max_rows
        """By batch slot, the position after those that have known pages."""
        self._next_starts = [range(0)] * max_rows
        """By batch slot, where the next row of its request may start."""

    def check(self, plan: StepPlan) -> None:
        """Checks a plan that will be launched, and notes its changes. O(rows + changed pages).

        Raises:
            DeviceError: a window page is beyond the pool, or an entry beyond its table.
            InvariantError: the device would not know the page of some position that a row reads or writes.
        """
        pages = [page for row in plan.rows for page in row.window_pages]
        pages += [page for pair in plan.window_copies for page in pair]
        if pages and not 0 <= min(pages) <= max(pages) < self._n_pages:
            raise DeviceError(
                f"step {plan.step} has window pages {min(pages)} to {max(pages)} of a pool of {self._n_pages}"
            )
        for row in plan.rows:
            slot, start = row.batch_slot, row.start
            end = start + row.n_tokens
            is_new = start not in self._next_starts[slot]
            if is_new:
                self._end_positions[slot] = 0
            if row.window_pages:
                self._note(plan.step, row, is_new=is_new)
            self._next_starts[slot] = range(end - row.n_drafts, end + 1)
            if start < self._first_starts[slot] or end > self._end_positions[slot]:
                raise InvariantError(
                    f"step {plan.step}, batch slot {slot}: no window pages are known for some positions of a row "
                    f"from {start} to {end - 1}, and the window of {self._window} before it: a row may start "
                    f"at {self._first_starts[slot]}, and end before {self._end_positions[slot]}"
                )

    def _note(self, step: int, row: Row, *, is_new: bool) -> None:
        slot, first, end = row.batch_slot, row.window_start, row.window_start + len(row.window_pages)
        if first < 0 or end > self._width:
            raise DeviceError(f"step {step}, batch slot {slot}: window table entries are beyond")
        if is_new or first != self._ends[slot]:
            self._first_starts[slot] = first * self._page_size + self._window - 1 if first else 0
        self._ends[slot], self._end_positions[slot] = end, end * self._page_size
