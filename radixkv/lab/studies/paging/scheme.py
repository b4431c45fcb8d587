"""The protocol of the memory management schemes that the study compares."""

from __future__ import annotations

from typing import Protocol

from radixkv.lab.studies.paging.memory import SlotUsage
from radixkv.lab.studies.paging.sequences import SimulatedSequence, Turn


class Scheme(Protocol):
    """Assigns the pool's slots to sequences, first come first served, one engine step at a time.

    A step calls ``begin``, optionally ``slot_usage``, then ``end``.
    """

    @property
    def n_waiting(self) -> int:
        """Sequences that have not started, or were preempted."""
        ...

    @property
    def n_copied(self) -> int:
        """Tokens copied because a sequence has outgrown its memory."""
        ...

    @property
    def n_preemptions(self) -> int:
        """How often a sequence lost its memory before its end and had to start again."""
        ...

    def add(self, turn: Turn) -> None:
        """Queues the sequences of a turn."""
        ...

    def begin(self) -> None:
        """Stores one more token of each running sequence; starts waiting ones that fit, with their whole prompt."""
        ...

    def running(self) -> list[SimulatedSequence]:
        """Returns the sequences that take part in this step."""
        ...

    def slot_usage(self) -> SlotUsage:
        """Returns the slot usage of this step; slots that it writes count as occupied."""
        ...

    def end(self) -> list[SimulatedSequence]:
        """Gives each running sequence its next token; frees the memory of complete sequences and returns them."""
        ...
