"""Contiguous memory: a sequence has one extent, which it may outgrow, and shares nothing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from radixkv.lab.studies.paging.allocators import Allocator, Extent, next_power_of_two
from radixkv.lab.studies.paging.memory import SlotUsage
from radixkv.lab.studies.paging.sequences import SimulatedSequence, Turn, count_distinct_tokens

RESERVED_FACTOR = 1.125
"""Slots that a sequence reserves under ``reserve_factor``, as a multiple of its expected length."""

ReservationRule = Callable[[SimulatedSequence, int], int]
"""Returns how many slots a sequence reserves when it has so many tokens to store: at least as many."""


def reserve_maximum(max_model_len: int) -> ReservationRule:
    """Reserves the maximum sequence length."""
    return lambda sequence, n_tokens: max_model_len


def reserve_power_of_two(max_model_len: int) -> ReservationRule:
    """Reserves the prompt plus the answer rounded up to a power of two: its length is known up to a factor of 2."""
    return lambda sequence, n_tokens: min(
        max_model_len, sequence.n_prompt + next_power_of_two(sequence.answer.n_tokens)
    )


def reserve_factor(max_model_len: int, mean_answer: float) -> ReservationRule:
    """Reserves ``RESERVED_FACTOR`` times the prompt with an average answer, or times the tokens it has if more.

    Args:
        max_model_len: the most that is reserved.
        mean_answer: average tokens of an answer, which a server knows from its past.
    """

    def reserve(sequence: SimulatedSequence, n_tokens: int) -> int:
        expected = max(sequence.n_prompt + mean_answer, n_tokens)
        return min(max_model_len, math.ceil(RESERVED_FACTOR * expected))

    return reserve


def reserve_exact_length(sequence: SimulatedSequence, n_tokens: int) -> int:
    """Reserves exactly what will be stored, which only an oracle knows."""
    return sequence.n_stored


def reserve_stored(sequence: SimulatedSequence, n_tokens: int) -> int:
    """Reserves what is stored now. With a buddy allocator, a full extent is replaced by one twice as long."""
    return n_tokens


@dataclass(slots=True, eq=False)
class _Allocation:
    """The memory of a running sequence."""

    extent: Extent
    n_stored: int
    """Stored tokens, including those of this step."""


class ContiguousScheme:
    """A scheme that keeps each sequence in contiguous memory.

    A sequence that has filled its extent gets another, as its rule says, and its KV is copied there; both are
    allocated for the step of the copy. If there is no room, the youngest sequences are preempted, in the end the
    sequence itself. A preempted sequence waits ahead of all others, and stores its tokens again when it restarts.

    Args:
        allocator: allocator of the pool; the reservation of every sequence must fit into the empty pool.
        reserve: how many slots a sequence reserves.
    """

    def __init__(self, allocator: Allocator, reserve: ReservationRule) -> None:
        self._allocator = allocator
        self._reserve = reserve
        self._waiting: deque[tuple[SimulatedSequence, int]] = deque()
        """Sequences, and how many tokens each stores in its first step."""
        self._running: dict[SimulatedSequence, _Allocation] = {}
        """The running sequences, the oldest start first."""
        self._outgrown: list[Extent] = []
        """Full extents from which this step copies."""
        self.n_preemptions = 0
        """How often a sequence lost its memory before its end and had to start again."""
        self.n_copied = 0
        """Tokens copied because a sequence has outgrown its extent."""

    @property
    def n_waiting(self) -> int:
        """Sequences that have not started, or were preempted."""
        return len(self._waiting)

    def add(self, turn: Turn) -> None:
        """Queues each sequence of the turn separately."""
        self._waiting += ((sequence, sequence.n_prompt) for sequence in turn.sequences)

    def begin(self) -> None:
        """Stores one more token of each running sequence and starts new ones. O(running) plus the allocations."""
        for sequence, allocation in tuple(self._running.items()):
            if allocation.n_stored < allocation.extent.n_slots or self._grow(sequence, allocation):
                allocation.n_stored += 1
        while self._waiting:
            extent = self._allocator.allocate(self._reserve(*self._waiting[0]))
            if extent is None:
                break
            sequence, n_tokens = self._waiting.popleft()
            self._running[sequence] = _Allocation(extent, n_tokens)

    def running(self) -> list[SimulatedSequence]:
        """Returns the running sequences in the order of their start."""
        return list(self._running)

    def slot_usage(self) -> SlotUsage:
        """Returns the slot usage of this step. O(running).

        Slots of an extent beyond the final length count as internal, whether the rule or the allocator added them.
        Outgrown extents are occupied by copies.
        """
        stored = reserved = internal = 0
        for sequence, allocation in self._running.items():
            n_slots = allocation.extent.n_slots
            n_useful = min(n_slots, sequence.n_stored)
            stored += allocation.n_stored
            reserved += n_useful - allocation.n_stored
            internal += n_slots - n_useful
        occupied = stored + sum(extent.n_slots for extent in self._outgrown)
        n_free = self._allocator.n_free
        is_fragmented = bool(self._waiting) and n_free >= self._allocator.allocated_size(
            self._reserve(*self._waiting[0])
        )
        distinct = count_distinct_tokens((sequence, one.n_stored) for sequence, one in self._running.items())
        return SlotUsage(
            occupied=occupied,
            reserved=reserved,
            internal=internal,
            external=n_free if is_fragmented else 0,
            free=0 if is_fragmented else n_free,
            cached=0,
            duplicate=occupied - distinct,
            stored=stored,
            entries=len(self._running),
        )

    def end(self) -> list[SimulatedSequence]:
        """Frees outgrown extents and the memory of the sequences that are complete; returns these. O(running)."""
        for extent in self._outgrown:
            self._allocator.free(extent)
        self._outgrown.clear()
        ended = [sequence for sequence, one in self._running.items() if one.n_stored == sequence.n_stored]
        for sequence in ended:
            self._allocator.free(self._running.pop(sequence).extent)
        return ended

    def _grow(self, sequence: SimulatedSequence, allocation: _Allocation) -> bool:
        """Moves a sequence to a larger extent; returns False if it is preempted instead, now or before."""
        n_slots = self._reserve(sequence, allocation.n_stored + 1)
        while sequence in self._running:
            extent = self._allocator.allocate(n_slots)
            if extent is not None:
                self._outgrown.append(allocation.extent)
                self.n_copied += allocation.n_stored
                allocation.extent = extent
                return True
            self._preempt_youngest()
        return False

    def _preempt_youngest(self) -> None:
        sequence, allocation = self._running.popitem()
        self._allocator.free(allocation.extent)
        self._waiting.appendleft((sequence, allocation.n_stored + 1))
        self.n_preemptions += 1
