"""The states that rows of prompts leave in the tree: placed, counted, and found once their steps are done."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from radixkv.runtime.request import Request
from radixkv.runtime.states.common_prefixes import CommonPrefixes
from radixkv.runtime.states.places import Places, Use
from radixkv.runtime.step.plan import StepPlan
from radixkv.tree.node import State
from radixkv.tree.states import NodeStates

_MIN_AWAITED_BLOCKS = 2
"""A prompt waits a step for a state if that saves so many blocks or more: fewer save less than a step takes."""

_SLOTS_A_REPEAT = 16
"""For so many slots of the tree, one state may be computed at a time that only the same prompt again can use."""


class _Awaited(NamedTuple):
    """What a waiting request waits for."""

    version: int
    """``NodeStates.version`` when this was found."""
    is_in_launched_step: bool
    """Whether a step computes the state already, and not a request that is on its way to its position."""


class KeptStates:
    """Keeps states of prompts in the tree, whatever they consist of.

    A state of a last message is evicted before all others once the next turn of the chat has gone on from it, and a
    state that only the same prompt again can use is from the start.

    Args:
        states: those of the tree.
        places: chooses the positions whose states are kept.
    """

    def __init__(self, states: NodeStates, places: Places) -> None:
        self._states = states
        self._places = places
        self._n_least = _MIN_AWAITED_BLOCKS * states.block_tokens
        self._common = CommonPrefixes(states.block_tokens, self._n_least)
        self._awaited: dict[Request, _Awaited] = {}
        """What requests wait for that were not to be admitted when they were asked for last."""
        self._coming: list[tuple[int, State]] = []
        """The states that rows of the next plan compute, each with the row's batch slot."""
        self._launched: dict[int, list[tuple[int, State]]] = {}
        """The same of each launched step, by its number."""
        self._repeats: set[State] = set()
        """Those of them that only the same prompt again can use."""
        self._max_repeats = max(1, states.n_slots // _SLOTS_A_REPEAT)
        self.n_hits = 0
        """Prompts that have gone on from a state."""
        self.n_missed_tokens = 0
        """Prompt tokens that were computed although their pages were cached, because no state was there."""

    def arrived(self, request: Request) -> None:
        """See ``States.arrived``. ``CommonPrefixes.arrived`` and ``NodeStates.expect``."""
        if not request.is_canary:
            self._common.arrived(request)
            if request.reads_cache:
                self._states.expect(request.namespace, request.key)

    def is_awaited(self, request: Request) -> bool:
        """See ``States.is_awaited``. ``NodeStates.n_coming``, and ``CommonPrefixes.awaited_position``; O(1) while
        the tree's states, and what the request waits for, stay the same."""
        self._states.take_left()
        found = self._awaited.get(request)
        if (
            found is not None
            and found.version == self._states.version
            and (found.is_in_launched_step or self._common.is_coming(request))
        ):
            return True
        found = self._wait_or_let_through(request)
        if found is None:
            self._awaited.pop(request, None)
            return False
        self._awaited[request] = found
        return True

    def left(self, request: Request) -> None:
        """See ``States.left``. ``CommonPrefixes.left``."""
        self._awaited.pop(request, None)
        self._common.left(request)

    def _wait_or_let_through(self, request: Request) -> _Awaited | None:
        """Returns what a waiting request is to wait for; None without it.

        Then ``CommonPrefixes`` takes note that it is let through, if others may wait for it.
        """
        if not request.reads_cache or request.recovery.bypasses_tree:
            return None
        if self._states.n_coming(request.namespace, request.key) >= self._n_least:
            return _Awaited(self._states.version, is_in_launched_step=True)
        if request.is_canary:
            return None  # it keeps no states, so nobody is to wait for it
        position = None if request.recovery.is_retried else self._common.awaited_position(request)
        if position is not None:
            n_found = self._states.n_found(request.namespace, request.key)
            if position - n_found >= self._n_least:
                return _Awaited(self._states.version, is_in_launched_step=False)
        self._common.let_through(request)
        return None

    def freed(self, request: Request) -> None:
        """See ``States.freed``. ``CommonPrefixes.freed``."""
        self._common.freed(request)

    def plan_row(self, request: Request, start: int, end: int, n_in_tree: int) -> list[State]:
        """Returns the states that a row of the next plan computes for the tree, in order of their positions.

        The block table gives up the state that the row goes on from. Takes the arguments of ``States.plan_row``.
        Costs what ``Places.choose`` and ``CommonPrefixes.plan_row`` do, and ``NodeStates.put`` for each state.
        """
        blocks, source = request.blocks, request.blocks.state
        if source is not None:
            blocks.state = None
            self.n_hits += not request.is_canary
        if blocks.lease is None or blocks.lease.detached or request.is_canary:
            self._common.left(request)
            return []
        if request.reads_cache:
            self.n_missed_tokens += max(0, n_in_tree - n_in_tree % self._states.block_tokens - start)
        if source is not None:
            self._states.use(source)
        added: list[State] = []
        places = self._places.choose(request, start, end, n_in_tree)
        for place in self._common.plan_row(request, start, end):
            places[place] = Use.SHARED
        for position, use in sorted(places.items(), key=itemgetter(0)):
            is_repeat = use is Use.REPEAT
            if max(start, 1) <= position <= end and not (is_repeat and len(self._repeats) >= self._max_repeats):
                state = self._states.put(blocks.lease, position, is_turn=use is not Use.SHARED)
                if state is not None:
                    added.append(state)
                    if is_repeat:
                        self._repeats.add(state)
        if source is not None and source.is_turn and added:
            self._states.demote(source)
        self._coming += [(request.batch_slot, state) for state in added]
        return added

    def launched(self, step: int) -> None:
        """Takes note that a step will be launched with the rows that were planned. O(1)."""
        if self._coming:
            self._launched[step], self._coming = self._coming, []

    def step_done(self, plan: StepPlan, are_right: Sequence[bool]) -> None:
        """See ``States.step_done``. O(rows), if the step computes states."""
        states = self._launched.pop(plan.step, ())
        if not states:
            return
        is_right = {row.batch_slot: right for row, right in zip(plan.rows, are_right, strict=True)}
        for batch_slot, state in states:
            if is_right[batch_slot]:
                self._states.computed(state)
                if state in self._repeats:
                    self._states.demote(state)
            else:
                self._states.drop(state)
            self._repeats.discard(state)

    def undo(self) -> None:
        """Takes note that all launched steps have failed. O(states)."""
        for states in self._launched.values():
            for _, state in states:
                self._states.drop(state)
                self._repeats.discard(state)
        self._launched.clear()
