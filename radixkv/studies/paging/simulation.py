"""Runs a workload through a scheme, and sees what memory is used for while requests wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, count
from typing import NamedTuple

from radixkv.bench.plural import counted
from radixkv.errors import ConfigError
from radixkv.studies.paging.memory import Memory, Shares, shares
from radixkv.studies.paging.scheme import Scheme
from radixkv.studies.paging.sequences import Sequence, Turn
from radixkv.studies.paging.workloads import Workload


class NeverFull(ConfigError):
    """Memory never ran out, so that there is nothing to see."""


class Stay(NamedTuple):
    """A sequence had memory from one step to another, both included, and got to its end."""

    first: int
    last: int


class Run(NamedTuple):
    """What came of a workload."""

    shares: Shares
    """On average over the saturated steps: those in which a sequence waits for memory."""
    mean_batch: float
    """Sequences that run in a saturated step."""
    largest_batch: int
    """Most sequences that ran at once, without those that had to give their memory back before their end."""
    n_steps: int
    n_saturated_steps: int


def simulate(scheme: Scheme, workload: Workload) -> Run:
    """Serves the whole workload: turns queue when they arrive, or when the one before is answered.

    Each sequence that runs gets one token a step. O(sequences x tokens of their answers).

    Raises:
        NeverFull: memory never ran out.
    """
    queue = _Arrivals(workload)
    since: dict[Sequence, int] = {}
    stays: list[Stay] = []
    moments: list[Memory] = []
    n_running = 0
    for step in count():
        for turn in queue.due(step):
            scheme.add(turn)
        scheme.begin()
        running = scheme.running()
        since = {sequence: since.get(sequence, step) for sequence in running}
        if scheme.n_waiting:
            moments.append(scheme.memory())
            n_running += len(running)
        for sequence in scheme.end():
            stays.append(Stay(since[sequence], step))
            queue.answered(sequence)
        if queue.is_done:
            break
    if not moments:
        n_sequences = counted(workload.n_sequences, "sequence")
        raise NeverFull(
            f"memory never ran out in {workload.name}, with {n_sequences}; ask for more of them "
            "(--num-prompts), or give a smaller pool (--max-total-tokens)"
        )
    return Run(shares(moments), n_running / len(moments), most_at_once(stays), step + 1, len(moments))


def most_at_once(stays: list[Stay]) -> int:
    """In how many of the stays the step lies that lies in most of them. O(stays log stays)."""
    changes = sorted([(stay.first, 1) for stay in stays] + [(stay.last + 1, -1) for stay in stays])
    return max(accumulate(change for _, change in changes), default=0)


class _Arrivals:
    """The turns of a workload, as they come."""

    def __init__(self, workload: Workload) -> None:
        self._coming = iter(zip(workload.arrivals, workload.conversations, strict=True))
        self._next = next(self._coming, None)
        self._following: list[Turn] = []
        """Those whose turn before is answered."""
        self._rest: dict[Sequence, tuple[list[Sequence], Iterator[Turn]]] = {}
        """By each sequence that is not answered: those of its turn, and the turns after it."""

    @property
    def is_done(self) -> bool:
        """Whether all is answered."""
        return self._next is None and not self._rest and not self._following

    def due(self, step: int) -> list[Turn]:
        """What joins the queue now."""
        turns, self._following = self._following, []
        while self._next is not None and self._next[0] <= step:
            rest = iter(self._next[1])
            turns.append(next(rest))
            self._expect(turns[-1], rest)
            self._next = next(self._coming, None)
        return turns

    def answered(self, sequence: Sequence) -> None:
        """The next turn of its conversation joins the queue if it was the last of its own."""
        left, rest = self._rest.pop(sequence)
        left.remove(sequence)
        if not left and (turn := next(rest, None)) is not None:
            self._expect(turn, rest)
            self._following.append(turn)

    def _expect(self, turn: Turn, rest: Iterator[Turn]) -> None:
        left = list(turn.sequences)
        for sequence in turn.sequences:
            self._rest[sequence] = left, rest
