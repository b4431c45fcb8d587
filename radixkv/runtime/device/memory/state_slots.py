"""The part of the host tier's memory that states of recurrent layers have."""

from __future__ import annotations

from radixkv.errors import ConfigError
from radixkv.runtime.step.page_copier import SlotPart

_MAX_SHARE = 0.5
"""Most of the host tier's memory that states get."""
_POSITION_BYTES = 8


class StateSlots:
    """Slots for states, at the beginning of the host tier's memory.

    A slot has a state, then its position, then unused bytes up to a whole number of pages' bytes: another tier
    keeps it as so many pages. With several ranks, a state is the parts of all, side by side. The memory is divided
    as the device's is, but pages have at least half of it.

    Args:
        state_bytes: size of a state, of this rank alone.
        n_states: number of states that the device keeps for the tree.
        page_bytes: size of a page, of this rank alone.
        n_pages: number of the device's pages.
        n_bytes: size of the host tier's memory.
        part: which part of each slot this rank has; None: all of it.

    Raises:
        ConfigError: the device keeps states, and the host has no room for one.
    """

    def __init__(
        self,
        *,
        state_bytes: int,
        n_states: int,
        page_bytes: int,
        n_pages: int,
        n_bytes: int,
        part: SlotPart | None = None,
    ) -> None:
        self._rank, n_ranks = (0, 1) if part is None else (part.rank, part.n_ranks)
        self._part_bytes, whole_bytes = state_bytes, n_ranks * state_bytes
        page_bytes *= 1 if part is None else part.n_parts
        on_device = n_states * whole_bytes
        n_state_bytes = int(n_bytes * min(_MAX_SHARE, on_device / (on_device + n_pages * page_bytes)))
        self._position_at = whole_bytes
        self._page_bytes = page_bytes
        self.slot_bytes = -(-(whole_bytes + _POSITION_BYTES) // page_bytes) * page_bytes
        """Size of a slot."""
        self.n_slots = n_state_bytes // self.slot_bytes
        """Number of slots."""
        if n_states and not self.n_slots:
            raise ConfigError(
                f"host_memory_bytes {n_bytes} leave {n_state_bytes} for states of recurrent layers, one of which "
                f"takes {whole_bytes}; set --host-memory higher"
            )

    @property
    def n_bytes(self) -> int:
        """Size of all slots, a multiple of a page's."""
        return self.n_slots * self.slot_bytes

    def first_byte(self, slot: int) -> int:
        """Returns where this rank's part of a state begins in the memory of all slots. O(1)."""
        return slot * self.slot_bytes + self._rank * self._part_bytes

    def buffers(self, memory: memoryview, slot: int) -> list[memoryview]:
        """Returns a slot of the memory in parts of a page's size. O(parts)."""
        first = slot * self.slot_bytes
        return [
            memory[at : at + self._page_bytes] for at in range(first, first + self.slot_bytes, self._page_bytes)
        ]

    def position(self, memory: memoryview, slot: int) -> int:
        """Returns the position of the state in a slot of the memory. O(1)."""
        return int.from_bytes(memory[self._position_in(slot)], "little")

    def set_position(self, memory: memoryview, slot: int, position: int) -> None:
        """Notes the position of the state in a slot of the memory, on rank 0. O(1)."""
        if not self._rank:
            memory[self._position_in(slot)] = position.to_bytes(_POSITION_BYTES, "little")

    def _position_in(self, slot: int) -> slice:
        first = slot * self.slot_bytes + self._position_at
        return slice(first, first + _POSITION_BYTES)
