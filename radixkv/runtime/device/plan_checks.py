"""Checks of a step plan that both devices make before they pack it."""

from __future__ import annotations

from radixkv.errors import DeviceError
from radixkv.runtime.step.plan import StepPlan


def check_plan(plan: StepPlan, n_batch_slots: int, n_pages: int) -> None:
    """Raises ``DeviceError`` if rows do not fit the batch slots, or page copies the pool. O(rows + copies)."""
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
    pages = [page for pair in plan.copies for page in pair]
    if pages and not 0 <= min(pages) <= max(pages) < n_pages:
        raise DeviceError(f"step {plan.step} copies pages {min(pages)} to {max(pages)} of a pool of {n_pages}")
    if len({destination for _, destination in plan.copies}) < len(plan.copies):
        raise DeviceError(f"step {plan.step} copies several pages to the same destination")
