"""Checks of a step plan that both devices make before they pack it."""

from __future__ import annotations

from radixkv.errors import DeviceError
from radixkv.runtime.step.plan import Row, Scoring, StepPlan


def check_plan(plan: StepPlan, n_batch_slots: int, n_pages: int) -> None:
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
