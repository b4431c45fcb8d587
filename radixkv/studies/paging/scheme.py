"""What the study compares: ways to give memory to sequences."""

from __future__ import annotations

from typing import Protocol

from radixkv.studies.paging.memory import Memory
from radixkv.studies.paging.sequences import Sequence, Turn


class Scheme(Protocol):
    """Gives the pool to sequences, first come first served, one step of the engine at a time.

    A step is ``begin``, then ``memory`` if that is wanted, then ``end``.
    """

    @property
    def n_waiting(self) -> int:
        """Sequences that have not begun, or were retracted."""
        ...

    def add(self, turn: Turn) -> None:
        """Queues the sequences of a turn."""
        ...

    def begin(self) -> None:
        """Lets those begin for whom there is room, with their whole prompts; the others store one token more."""
        ...

    def running(self) -> list[Sequence]:
        """Those that have a part in the step."""
        ...

    def memory(self) -> Memory:
        """Of this step: what it writes is counted as occupied."""
        ...

    def end(self) -> list[Sequence]:
        """Gives each sequence its next token; takes back the memory of those that have all, and returns them."""
        ...
