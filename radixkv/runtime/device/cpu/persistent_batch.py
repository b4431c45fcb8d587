"""State of the batch slots that stays on the CPU device between steps: block tables and last sampled tokens."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.runtime.device.attention.cpu.base import RowSpan
from radixkv.runtime.device.memory_check import check_allocation
from radixkv.runtime.device.ops.base import TokenInputs, TokenSpan
from radixkv.runtime.device.pack import PackedStep


class PersistentBatch:
    """Block tables and last sampled tokens of the batch slots.

    Args:
        max_rows: number of batch slots.
        max_model_len: most positions of a sequence.
        page_size: tokens per page.

    Raises:
        ConfigError: the block tables do not fit into memory.
    """

    def __init__(self, *, max_rows: int, max_model_len: int, page_size: int) -> None:
        self._page_size = page_size
        shape = (max_rows, -(-max_model_len // page_size))
        with check_allocation(
            4 * math.prod(shape),
            f"a block table for max_num_seqs {max_rows} and max_model_len {max_model_len}",
            "set one of them lower",
        ):
            self._tables = np.zeros(shape, dtype=np.int32)
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int64)
        """[batch slots]: the token that each batch slot sampled last."""

    def update(self, step: PackedStep) -> None:
        """Applies the block table updates of a step. O(rows + changed pages)."""
        rows = step.rows
        for row in np.flatnonzero(rows.update_counts).tolist():
            first, start, n_pages = rows.update_firsts[row], rows.table_starts[row], rows.update_counts[row]
            self._tables[rows.batch_slots[row], start : start + n_pages] = step.updates[first : first + n_pages]

    def spans(self, step: PackedStep) -> tuple[RowSpan, ...]:
        """Returns the rows of a step with the pages that they read, which ``update`` does not change. O(pages)."""
        return tuple(
            RowSpan(
                first, n_tokens, start, self._tables[batch_slot, : -(-(start + n_tokens) // self._page_size)].copy()
            )
            for batch_slot, start, n_tokens, first in np.stack(step.rows[:4], 1).tolist()
        )

    def inputs(self, step: PackedStep, sequences: tuple[TokenSpan, ...] = ()) -> TokenInputs:
        """Returns the tokens of a step, with the ids that were sampled before. O(tokens).

        Args:
            step: the step.
            sequences: the parts of its tokens for layers with states.
        """
        row = np.repeat(np.arange(step.n_rows), step.rows.n_tokens)
        places = np.arange(len(step.ids)) + (step.rows.starts - step.rows.firsts)[row]
        positions = places + step.rows.n_skipped[row]
        batch_slots = step.rows.batch_slots[row]
        slots = self._tables[batch_slots, places // self._page_size].astype(np.int64)
        slots = slots * self._page_size + places % self._page_size
        slots[places < step.rows.write_starts[row]] = -1
        ids = step.ids.astype(np.int64)
        is_sampled = ids == -1
        ids[is_sampled] = self.last_tokens.numpy()[batch_slots[is_sampled]]
        return TokenInputs(_tensor(ids), _tensor(positions), _tensor(slots), sequences)


def _tensor(values: NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64, copy=False))
