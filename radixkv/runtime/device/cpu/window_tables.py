"""Window block tables of the batch slots of a CPU device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from radixkv.runtime.device.attention.cpu.base import RowSpan
from radixkv.runtime.device.ops.base import TokenInputs
from radixkv.runtime.device.pack import PackedStep
from radixkv.runtime.step.plan import StepPlan


class WindowTables:
    """The window page of each entry of each batch slot's block table, as far as rows read it.

    Args:
        max_rows: number of batch slots.
        max_model_len: most positions of a sequence.
        page_size: tokens per page.
    """

    def __init__(self, *, max_rows: int, max_model_len: int, page_size: int) -> None:
        self._page_size = page_size
        self._tables = np.zeros((max_rows, -(-max_model_len // page_size)), dtype=np.int32)

    def update(self, plan: StepPlan) -> None:
        """Applies the changes of a step, which ``WindowEntries`` has checked. O(rows + changed pages)."""
        for row in plan.rows:
            if row.window_pages:
                end = row.window_start + len(row.window_pages)
                self._tables[row.batch_slot, row.window_start : end] = row.window_pages

    def spans(self, step: PackedStep, spans: tuple[RowSpan, ...]) -> tuple[RowSpan, ...]:
        """Returns the rows of a step with the window pages that they read. O(pages)."""
        return tuple(
            replace(span, pages=self._tables[batch_slot, : len(span.pages)].copy())
            for batch_slot, span in zip(step.rows.batch_slots.tolist(), spans, strict=True)
        )

    def inputs(self, step: PackedStep, inputs: TokenInputs) -> TokenInputs:
        """Returns the tokens of a step for layers with windows, which store K and V of all of them. O(tokens)."""
        batch_slots = np.repeat(step.rows.batch_slots, step.rows.n_tokens)
        positions = inputs.positions.numpy()
        slots = self._tables[batch_slots, positions // self._page_size].astype(np.int64)
        slots = slots * self._page_size + positions % self._page_size
        return replace(inputs, slot_mapping=torch.from_numpy(slots))
