"""Which rows of a step belong to which adapter, in blocks of rows of one adapter at fixed addresses."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from radixkv.runtime.device.ops.cuda.lora import AdapterBlocks
from radixkv.runtime.device.pack import Ints
from radixkv.runtime.step.plan import StepPlan

NO_ADAPTER = -1
"""Slot of a row that no adapter changes."""
_FEW_ROWS = 256
_ADAPTERS_AT_ONCE = 8
"""Adapters of a step up to which each block has a program of its own."""


def block_rows(n_rows: int) -> int:
    """Returns the rows of a block, for a step of so many rows."""
    return 16 if n_rows <= _FEW_ROWS else 32


def most_blocks(n_rows: int, n_slots: int) -> int:
    """Returns the most blocks that rows of any adapters can have."""
    n_adapters = min(n_rows, n_slots)
    return n_adapters + (n_rows - n_adapters) // block_rows(n_rows)


def token_slots(plan: StepPlan, slots: Mapping[str, int]) -> Ints | None:
    """Returns the slot of each token's adapter, [tokens], row after row; None if no row has one.

    O(rows) in Python, and O(tokens) in NumPy if a row has an adapter.

    Args:
        plan: whose adapters all have slots.
        slots: by digest of an adapter.
    """
    if not any(row.adapter for row in plan.rows):
        return None
    values, lengths = list[int](), list[int]()
    for row in plan.rows:
        n_tokens = row.n_tokens
        if row.adapter_start > row.start:
            n_before = min(row.adapter_start - row.start, n_tokens)
            values.append(NO_ADAPTER)
            lengths.append(n_before)
            n_tokens -= n_before
        values.append(slots[row.adapter] if row.adapter else NO_ADAPTER)
        lengths.append(n_tokens)
    return np.repeat(np.array(values, np.int32), lengths)


def in_blocks(slots: Ints, n_rows: int) -> tuple[Ints, Ints]:
    """Sorts rows into blocks of ``n_rows`` places.

    Args:
        slots: [rows], of each row's adapter.
        n_rows: places of a block.

    Returns:
        [blocks], each block's slot, ascending; and [blocks * n_rows], the row at each place, or -1. The rows of an
        adapter are in their order.
    """
    adapted = np.flatnonzero(slots != NO_ADAPTER)
    adapted = adapted[np.argsort(slots[adapted], kind="stable")]
    used, firsts, counts = np.unique(slots[adapted], return_index=True, return_counts=True)
    n_blocks = -(-counts // n_rows)
    begins = (np.cumsum(n_blocks) - n_blocks) * n_rows
    rows = np.full(n_blocks.sum() * n_rows, -1, np.int32)
    rows[np.arange(len(adapted)) + np.repeat(begins - firsts, counts)] = adapted
    return np.repeat(used, n_blocks).astype(np.int32), rows


class DeviceBlocks:
    """Blocks on the device, at addresses that CUDA graphs can read.

    Args:
        max_rows: most rows of activations.
        n_slots: slots of adapters.
        device: where they are.
    """

    def __init__(self, max_rows: int, n_slots: int, device: torch.device) -> None:
        sizes = {min(max_rows, _FEW_ROWS), max_rows}
        self._n_slots = n_slots
        self._first_slot = 4
        self._first_row = 4 + -(-max(most_blocks(size, n_slots) for size in sizes) // 4) * 4
        n_places = max(most_blocks(size, n_slots) * block_rows(size) for size in sizes)
        self._values = torch.zeros(self._first_row + n_places, dtype=torch.int32, device=device)
        """The number of blocks, their slots, and their rows."""

    def put(self, slots: Ints, n_padded: int) -> AdapterBlocks:
        """Enqueues the copy of a step's blocks, in one piece.

        Args:
            slots: [rows], of each row's adapter.
            n_padded: at least the number of rows. Which kernels are launched depends on this alone.
        """
        n_rows = block_rows(n_padded)
        block_slots, rows = in_blocks(slots, n_rows)
        is_pinned = self._values.is_cuda
        host = torch.empty(self._first_row + len(rows), dtype=torch.int32, pin_memory=is_pinned)
        values = host.numpy()
        values[0] = len(block_slots)
        values[self._first_slot : self._first_slot + len(block_slots)] = block_slots
        values[self._first_row :] = rows
        self._values[: len(host)].copy_(host, non_blocking=True)
        n_max = most_blocks(n_padded, self._n_slots)
        return AdapterBlocks(
            count=self._values[:1],
            slots=self._values[self._first_slot : self._first_row],
            rows=self._values[self._first_row :],
            n_rows=n_rows,
            n_max=n_max,
            n_programs=min(n_max, _ADAPTERS_AT_ONCE + n_padded // n_rows),
        )


class StepAdapters:
    """The adapters of the rows of the step that is enqueued or captured, which all layers with adapters read.

    Args:
        slots: by digest of an adapter; they may change between steps.
        max_tokens: most tokens of a step.
        max_rows: most rows of a step, with padding.
        n_slots: number of slots.
        device: which computes.
    """

    def __init__(
        self, slots: Mapping[str, int], *, max_tokens: int, max_rows: int, n_slots: int, device: torch.device
    ) -> None:
        self.blocks: AdapterBlocks | None = None
        """The rows that the next layers compute; None: none of the step's rows has an adapter."""
        self._slots = slots
        self._tokens = DeviceBlocks(max(max_tokens, max_rows), n_slots, device)
        self._outputs = DeviceBlocks(max_rows, n_slots, device)
        self._planned_outputs: AdapterBlocks | None = None

    def token_slots(self, plan: StepPlan) -> Ints | None:
        """See ``token_slots``."""
        return token_slots(plan, self._slots)

    def plan(self, slots: Ints | None, n_padded: int, outputs: Ints | None = None) -> None:
        """Enqueues the plan of a step; it is that of all layers until ``select_outputs``.

        Args:
            slots: [tokens], of each token's adapter; None: the step is computed as one without adapters.
            n_padded: tokens and padding.
            outputs: [n], indices of the tokens that the end of the last layer computes; None: all tokens.
        """
        self.blocks = self._planned_outputs = None
        if slots is None:
            return
        self.blocks = self._tokens.put(slots, n_padded)
        if outputs is not None:
            self._planned_outputs = self._outputs.put(slots[outputs], len(outputs))

    def select_outputs(self) -> None:
        """Makes the layers that follow compute the rows of ``outputs`` alone."""
        self.blocks = self._planned_outputs
