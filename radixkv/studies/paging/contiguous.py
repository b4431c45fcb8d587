"""Contiguous reservation: a sequence gets all its memory in one extent when it starts, and shares nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from radixkv.studies.paging.allocators import Allocator, Extent, next_power_of_two
from radixkv.studies.paging.memory import SlotUsage
from radixkv.studies.paging.sequences import SimulatedSequence, Turn, count_distinct_tokens

ReservationRule = Callable[[SimulatedSequence], int]
"""Returns how many slots a sequence reserves: at least as many as it stores."""


def reserve_maximum(max_model_len: int) -> ReservationRule:
    """Reserves the maximum sequence length."""
    return lambda _: max_model_len


def reserve_power_of_two(max_model_len: int) -> ReservationRule:
    """Reserves the prompt plus the answer rounded up to a power of two: its length is known up to a factor of 2."""
    return lambda sequence: min(max_model_len, sequence.n_prompt + next_power_of_two(sequence.answer.n_tokens))


def reserve_exact_length(sequence: SimulatedSequence) -> int:
    """Reserves exactly what will be stored, which only an oracle knows."""
    return sequence.n_stored


class ContiguousScheme:
    """A scheme that reserves contiguous memory for each sequence.

    Args:
        allocator: allocator of the pool; the reservation of every sequence must fit into the empty pool.
        reserve: how many slots a sequence reserves.
    """

    def __init__(self, allocator: Allocator, reserve: ReservationRule) -> None:
        self._allocator = allocator
        self._reserve = reserve
        self._waiting: deque[SimulatedSequence] = deque()
        self._extents: dict[SimulatedSequence, Extent] = {}
        self._stored: dict[SimulatedSequence, int] = {}
        """Stored tokens of each running sequence, including those of this step."""

    @property
    def n_waiting(self) -> int:
        """Sequences that have not started."""
        return len(self._waiting)

    def add(self, turn: Turn) -> None:
        """Queues each sequence of the turn separately."""
        self._waiting += turn.sequences

    def begin(self) -> None:
        """Stores one more token of each running sequence and starts new ones. O(running) plus the allocations."""
        for sequence in self._stored:
            self._stored[sequence] += 1
        while self._waiting:
            extent = self._allocator.allocate(self._reserve(self._waiting[0]))
            if extent is None:
                break
            sequence = self._waiting.popleft()
            self._extents[sequence] = extent
            self._stored[sequence] = sequence.n_prompt

    def running(self) -> list[SimulatedSequence]:
        """Returns the running sequences in the order of their start."""
        return list(self._stored)

    def slot_usage(self) -> SlotUsage:
        """Returns the slot usage of this step. O(running).

        Slots of an extent beyond the final length count as internal, whether the rule or the allocator added them.
        """
        occupied = sum(self._stored.values())
        final = sum(sequence.n_stored for sequence in self._stored)
        allocated = sum(extent.n_slots for extent in self._extents.values())
        n_free = self._allocator.n_free
        is_fragmented = bool(self._waiting) and n_free >= self._allocator.allocated_size(
            self._reserve(self._waiting[0])
        )
        return SlotUsage(
            occupied=occupied,
            reserved=final - occupied,
            internal=allocated - final,
            external=n_free if is_fragmented else 0,
            free=0 if is_fragmented else n_free,
            cached=0,
            duplicate=occupied - count_distinct_tokens(self._stored.items()),
            stored=occupied,
            entries=len(self._extents),
        )

    def end(self) -> list[SimulatedSequence]:
        """Frees the memory of the sequences that are complete, and returns them. O(running)."""
        ended = [sequence for sequence, n_stored in self._stored.items() if n_stored == sequence.n_stored]
        for sequence in ended:
            del self._stored[sequence]
            self._allocator.free(self._extents.pop(sequence))
        return ended
