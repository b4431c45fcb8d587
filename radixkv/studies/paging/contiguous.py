"""Contiguous reservation: a sequence gets all of its memory when it begins, in one piece, and shares nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from radixkv.studies.paging.allocators import Allocator, Block, next_power_of_two
from radixkv.studies.paging.memory import Memory
from radixkv.studies.paging.sequences import Sequence, Turn, n_distinct

Reserve = Callable[[Sequence], int]
"""How many slots a sequence reserves, at least as many as it stores."""


def to_maximum(max_model_len: int) -> Reserve:
    """The longest that any sequence can become."""
    return lambda _: max_model_len


def to_power_of_two(max_model_len: int) -> Reserve:
    """The prompt and the next power of two of the answer's length, which is thus known but for a factor of 2."""
    return lambda sequence: min(max_model_len, sequence.n_prompt + next_power_of_two(sequence.answer.n_tokens))


def to_length(sequence: Sequence) -> int:
    """What will be stored, as only an oracle knows it."""
    return sequence.n_stored


class Contiguous:
    """A scheme that reserves.

    Args:
        allocator: over the pool; a reservation of any sequence must fit into an empty one.
        reserve: how much a sequence reserves.
    """

    def __init__(self, allocator: Allocator, reserve: Reserve) -> None:
        self._allocator = allocator
        self._reserve = reserve
        self._waiting: deque[Sequence] = deque()
        self._blocks: dict[Sequence, Block] = {}
        self._stored: dict[Sequence, int] = {}
        """Tokens of each running sequence, those of this step included."""

    @property
    def n_waiting(self) -> int:
        """Sequences that have not begun."""
        return len(self._waiting)

    def add(self, turn: Turn) -> None:
        """Queues the sequences, each for itself."""
        self._waiting += turn.sequences

    def begin(self) -> None:
        """O(running), and what the allocator takes for those that begin."""
        for sequence in self._stored:
            self._stored[sequence] += 1
        while self._waiting:
            block = self._allocator.allocate(self._reserve(self._waiting[0]))
            if block is None:
                break
            sequence = self._waiting.popleft()
            self._blocks[sequence] = block
            self._stored[sequence] = sequence.n_prompt

    def running(self) -> list[Sequence]:
        """In the order of their begin."""
        return list(self._stored)

    def memory(self) -> Memory:
        """O(running). What a block has beyond the sequence's end counts as internal, whoever made it so large."""
        occupied = sum(self._stored.values())
        final = sum(sequence.n_stored for sequence in self._stored)
        allocated = sum(block.n_slots for block in self._blocks.values())
        n_free = self._allocator.n_free
        is_elsewhere = bool(self._waiting) and n_free >= self._allocator.size_of(self._reserve(self._waiting[0]))
        return Memory(
            occupied=occupied,
            reserved=final - occupied,
            internal=allocated - final,
            external=n_free if is_elsewhere else 0,
            free=0 if is_elsewhere else n_free,
            cached=0,
            duplicate=occupied - n_distinct(self._stored.items()),
            stored=occupied,
            entries=len(self._blocks),
        )

    def end(self) -> list[Sequence]:
        """O(running)."""
        ended = [sequence for sequence, n_stored in self._stored.items() if n_stored == sequence.n_stored]
        for sequence in ended:
            del self._stored[sequence]
            self._allocator.free(self._blocks.pop(sequence))
        return ended
