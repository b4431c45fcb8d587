"""The simulation of a workload under a scheme, which measures slot usage while requests wait for memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, count
from typing import NamedTuple, Protocol

from radixkv.errors import ConfigError
from radixkv.lab.bench.formatting import plural
from radixkv.lab.studies.paging.memory import SlotShares, SlotUsage, average_shares
from radixkv.lab.studies.paging.sequences import SimulatedSequence, Turn
from radixkv.lab.studies.paging.workloads import StudyWorkload


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


class NeverFull(ConfigError):
    """Raised if no request ever waited for memory, so there is nothing to measure."""


class RunningSpan(NamedTuple):
    """The steps from the last start of a sequence to its end."""

    first: int
    """First step."""
    last: int
    """Last step, inclusive."""


class SimulationResult(NamedTuple):
    """The result of a workload under a scheme."""

    shares: SlotShares
    """Average over the saturated steps: those in which a sequence waits for memory."""
    mean_batch: float
    """Average number of running sequences in a saturated step."""
    largest_batch: int
    """Maximum number of sequences that ran at once, not counting runs that ended in a preemption."""
    n_steps: int
    """All steps."""
    n_saturated_steps: int
    """Steps in which a sequence waited for memory."""


def simulate(scheme: Scheme, workload: StudyWorkload) -> SimulationResult:
    """Serves the whole workload; each running sequence gets one token per step. O(sequences x answer tokens).

    A turn is queued when it arrives, or when the previous turn of its chat is answered.

    Raises:
        NeverFull: memory never ran out.
    """
    queue = _TurnQueue(workload)
    start_steps: dict[SimulatedSequence, int] = {}
    spans: list[RunningSpan] = []
    usages: list[SlotUsage] = []
    n_running = 0
    for step in count():
        for turn in queue.due(step):
            scheme.add(turn)
        scheme.begin()
        running = scheme.running()
        start_steps = {sequence: start_steps.get(sequence, step) for sequence in running}
        if scheme.n_waiting:
            usages.append(scheme.slot_usage())
            n_running += len(running)
        for sequence in scheme.end():
            spans.append(RunningSpan(start_steps[sequence], step))
            queue.answered(sequence)
        if queue.is_done:
            break
    if not usages:
        n_sequences = plural(workload.n_sequences, "sequence")
        raise NeverFull(
            f"memory never ran out in {workload.name}, with {n_sequences}; increase --num-prompts or decrease "
            "--max-total-tokens"
        )
    return SimulationResult(
        average_shares(usages), n_running / len(usages), max_overlap(spans), step + 1, len(usages)
    )


def max_overlap(spans: list[RunningSpan]) -> int:
    """Returns the maximum number of spans that contain the same step. O(spans log spans)."""
    changes = sorted([(span.first, 1) for span in spans] + [(span.last + 1, -1) for span in spans])
    return max(accumulate(change for _, change in changes), default=0)


class _TurnQueue:
    """The turns of a workload that are due, in order of arrival."""

    def __init__(self, workload: StudyWorkload) -> None:
        self._arrivals = iter(zip(workload.arrivals, workload.conversations, strict=True))
        self._next = next(self._arrivals, None)
        self._follow_ups: list[Turn] = []
        """Turns whose previous turn is answered."""
        self._pending: dict[SimulatedSequence, tuple[list[SimulatedSequence], Iterator[Turn]]] = {}
        """Each unanswered sequence, with the unanswered sequences of its turn and the turns that follow."""

    @property
    def is_done(self) -> bool:
        """Whether all sequences are answered."""
        return self._next is None and not self._pending and not self._follow_ups

    def due(self, step: int) -> list[Turn]:
        """Removes and returns the turns that are queued before this step."""
        turns, self._follow_ups = self._follow_ups, []
        while self._next is not None and self._next[0] <= step:
            later_turns = iter(self._next[1])
            turns.append(next(later_turns))
            self._add_pending(turns[-1], later_turns)
            self._next = next(self._arrivals, None)
        return turns

    def answered(self, sequence: SimulatedSequence) -> None:
        """Marks a sequence as answered; queues the next turn if it was the last unanswered one of its turn."""
        unanswered, later_turns = self._pending.pop(sequence)
        unanswered.remove(sequence)
        if not unanswered and (turn := next(later_turns, None)) is not None:
            self._add_pending(turn, later_turns)
            self._follow_ups.append(turn)

    def _add_pending(self, turn: Turn, later_turns: Iterator[Turn]) -> None:
        unanswered = list(turn.sequences)
        for sequence in turn.sequences:
            self._pending[sequence] = unanswered, later_turns
