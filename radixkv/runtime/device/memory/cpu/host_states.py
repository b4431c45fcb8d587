"""Host slots of the CPU device for states of recurrent layers: memory beside the slots of its tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from radixkv.runtime.device.memory.cpu.recurrent_states import RecurrentStates
from radixkv.runtime.device.memory.state_slots import StateSlots


class CpuHostStates:
    """``copy_threads.HostStates`` over ``RecurrentStates``.

    Args:
        states: those of the device.
        slots: where the memory has what.
        memory: of all slots.
    """

    def __init__(self, states: RecurrentStates, slots: StateSlots, memory: memoryview) -> None:
        self.n_slots = slots.n_slots
        self._states, self._slots, self._memory = states, slots, memory

    def buffers(self, slot: int) -> list[memoryview]:
        """See ``HostStates.buffers``. O(parts)."""
        return self._slots.buffers(self._memory, slot)

    def load(self, states: Sequence[tuple[int, int]]) -> None:
        """See ``HostStates.load``. O(bytes)."""
        for slot, tree_slot in states:
            for on_host, part in self._parts(slot, tree_slot):
                part.copy_(on_host)
            self._states.set_position(tree_slot, self._slots.position(self._memory, slot))

    def store(self, states: Sequence[tuple[int, int]]) -> None:
        """See ``HostStates.store``. O(bytes)."""
        for slot, tree_slot in states:
            for on_host, part in self._parts(slot, tree_slot):
                on_host.copy_(part)
            self._slots.set_position(self._memory, slot, self._states.position(tree_slot))

    def _parts(self, slot: int, tree_slot: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the parts of a state as bytes, on the host and in the tree's slot."""
        first = self._slots.first_byte(slot)
        for part in self._states.parts(tree_slot):
            n_bytes = part.nbytes
            on_host = torch.frombuffer(self._memory, dtype=torch.uint8, count=n_bytes, offset=first)
            yield on_host, part.flatten().view(torch.uint8)
            first += n_bytes
