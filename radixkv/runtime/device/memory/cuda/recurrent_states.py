"""The states of recurrent layers on the GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.runtime.device.memory.state_positions import StatePositions
from radixkv.runtime.device.memory.state_size import state_bytes
from radixkv.runtime.device.model_config.states import RecurrentConfig
from radixkv.runtime.device.ops.base import LayerStates
from radixkv.runtime.step.plan import StateSave, StepPlan


class SortedSaves(NamedTuple):
    """The states that a step saves, by when its rows come to their positions."""

    before: list[StateSave]
    """Of the positions where rows begin."""
    within: list[StateSave]
    after: list[StateSave]
    """Of the positions where rows end."""

    @classmethod
    def of(cls, plan: StepPlan) -> SortedSaves:
        """Sorts those of a plan. O(1), and O(rows + states) if there are any."""
        found = cls([], [], [])
        if plan.state_saves:
            ends = {row.batch_slot: (row.start, row.start + row.n_tokens) for row in plan.rows}
            for save in plan.state_saves:
                start, end = ends[save.batch_slot]
                found[(save.position > start) + (save.position == end)].append(save)
        return found


class CudaStates:
    """States of all recurrent layers as ``layers``: a set for each batch slot, then one for each slot of the tree.

    Copies are enqueued on the current stream. Memory: what ``state_bytes`` says for each set.

    Args:
        config: of the delta nets.
        n_batch_slots: number of batch slots.
        n_tree_slots: number of slots of the tree.
        dtype: of activations.
        device: where the states are allocated.
    """

    def __init__(
        self,
        config: RecurrentConfig,
        n_batch_slots: int,
        n_tree_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        n_layers, n_slots = len(config.layers), n_batch_slots + n_tree_slots
        inputs = (n_layers, n_slots, config.n_taps - 1, config.n_channels)
        memory = (n_layers, n_slots, config.n_value_heads, config.key_dim, config.value_dim)
        self._inputs = torch.zeros(inputs, dtype=dtype, device=device)
        self._memory = torch.zeros(memory, dtype=torch.float32, device=device)
        self.layers = [LayerStates(*one) for one in zip(self._inputs, self._memory, strict=True)]
        """States of each delta net."""
        self.n_bytes = state_bytes(config, dtype)
        """Bytes of a slot."""
        self.n_batch_slots = n_batch_slots
        self.n_tree_slots = n_tree_slots
        self._positions = StatePositions(n_batch_slots, n_tree_slots)

    def position(self, slot: int) -> int:
        """See ``StatePositions.position``."""
        return self._positions.position(slot)

    def set_position(self, slot: int, position: int) -> None:
        """See ``StatePositions.set_position``."""
        self._positions.set_position(slot, position)

    def parts(self, slot: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns addresses and sizes of what a slot of the tree has, in one order for all slots. O(layers)."""
        index, layers = self.n_batch_slots + slot, np.arange(len(self.layers))
        addresses, sizes = [], []
        for values in (self._memory, self._inputs):
            n_bytes, n_slots = values[0, 0].nbytes, values.shape[1]
            addresses.append(values.data_ptr() + (layers * n_slots + index) * n_bytes)
            sizes.append(np.full(len(layers), n_bytes))
        return np.concatenate(addresses), np.concatenate(sizes)

    def check(self, plan: StepPlan) -> None:
        """See ``StatePositions.check``."""
        self._positions.check(plan)

    def warm_up(self) -> None:
        """Enqueues a first copy, of empty states: the driver loads its kernels when the device is idle."""
        self._copy(0, -1)

    def load(self, plan: StepPlan) -> None:
        """Enqueues copies of states that batch slots go on from. O(bytes) on the device."""
        for source, batch_slot in plan.state_forks:
            self._copy(source, batch_slot)
        for slot, batch_slot in plan.state_loads:
            self._copy(self.n_batch_slots + slot, batch_slot)

    def save(self, saves: Iterable[StateSave]) -> None:
        """Enqueues copies of the states that batch slots have now. O(bytes) on the device."""
        for batch_slot, _, slot in saves:
            self._copy(batch_slot, self.n_batch_slots + slot)

    def _copy(self, source: int, destination: int) -> None:
        for values in (self._inputs, self._memory):
            values[:, destination].copy_(values[:, source])
