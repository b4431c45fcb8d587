"""Host slots of the CPU device for states of recurrent layers: memory beside the slots of its tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radixkv.runtime.device.memory.cpu.recurrent_states import RecurrentStates

_POSITION_BYTES = 8


class CpuHostStates:
    """``copy_threads.HostStates`` over ``RecurrentStates``.

    A slot has the position of its state, then the state, then zeros up to a whole number of pages' bytes: another
    tier keeps it as so many pages.

    Args:
        states: those of the device.
        n_bytes: size of the host memory; the slots are as many as fit.
        page_bytes: size of a page.
    """

    def __init__(self, states: RecurrentStates, n_bytes: int, page_bytes: int) -> None:
        n_used = _POSITION_BYTES + states.n_bytes
        self._page_bytes = page_bytes
        self.slot_bytes = -(-n_used // page_bytes) * page_bytes
        """Size of a slot."""
        self.n_slots = n_bytes // self.slot_bytes
        self._memory = torch.empty(self.n_slots, self.slot_bytes, dtype=torch.uint8)
        self._memory[:, n_used:] = 0
        self._states = states

    def buffers(self, slot: int) -> list[memoryview]:
        """See ``HostStates.buffers``. O(parts)."""
        memory, size = self._memory[slot].numpy().data.cast("B"), self._page_bytes
        return [memory[first : first + size] for first in range(0, len(memory), size)]

    def load(self, states: Sequence[tuple[int, int]]) -> None:
        """See ``HostStates.load``. O(bytes)."""
        for slot, tree_slot in states:
            memory = self._memory[slot]
            position = int.from_bytes(bytes(memory[:_POSITION_BYTES].tolist()), "little")
            first = _POSITION_BYTES
            for part in self._states.parts(tree_slot):
                of_part = part.flatten().view(torch.uint8)
                of_part.copy_(memory[first : first + len(of_part)])
                first += len(of_part)
            self._states.set_position(tree_slot, position)

    def store(self, states: Sequence[tuple[int, int]]) -> None:
        """See ``HostStates.store``. O(bytes)."""
        for slot, tree_slot in states:
            memory = self._memory[slot]
            position = self._states.position(tree_slot).to_bytes(_POSITION_BYTES, "little")
            memory[:_POSITION_BYTES] = torch.tensor(list(position), dtype=torch.uint8)
            first = _POSITION_BYTES
            for part in self._states.parts(tree_slot):
                of_part = part.flatten().view(torch.uint8)
                memory[first : first + len(of_part)] = of_part
                first += len(of_part)
