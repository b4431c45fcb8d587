"""Recurrent layers' states: how they come from batch slots into the tree, and back."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.protocols.states import States
from radixkv.runtime.request import Phase, Request
from radixkv.runtime.states.answer_ends import AnswerEnds
from radixkv.runtime.states.kept_states import KeptStates
from radixkv.runtime.states.places import LikelyPlaces, Places
from radixkv.runtime.step.plan import StateFork, StateLoad, StateSave, StepPlan
from radixkv.tree.node import State
from radixkv.wire.stats import StateStats


class RecurrentStates(States):
    """Copies the states of recurrent layers from batch slots to slots of the tree, and from there to batch slots.

    See docs/decisions/0066-states-of-delta-nets.md.

    Args:
        cache: the page cache, whose tree has states.
        places: chooses the positions of prompts whose states are kept.
    """

    def __init__(self, cache: PageCache, places: Places) -> None:
        assert cache.recurrent_states is not None, "the cache was made for a model with recurrent layers"
        self._states = cache.recurrent_states
        self._kept = KeptStates(self._states, places)
        self._answer_ends = AnswerEnds(self._states)
        self.block_tokens = self._states.block_tokens
        self._loads: list[StateLoad] = []
        self._saves: list[StateSave] = []
        self._held: list[State] = []
        """The states that rows of the next plan read or write in the device: each keeps its slot until they have,
        because a copy from another tier could overwrite it at once."""
        self._held_by: dict[int, list[State]] = {}
        """The same of each launched step, by its number."""
        self._forks: list[tuple[StateFork, Request]] = []
        """The forks that get their states with the next plan."""
        self._forked_by: dict[int, list[Request]] = {}
        """The forks that get their states with each launched step, by its number."""

    @classmethod
    def at_likely_places(cls, cache: PageCache, end_token_ids: frozenset[int]) -> RecurrentStates:
        """Returns what keeps states at ``LikelyPlaces``.

        Args:
            cache: the page cache, whose tree has states.
            end_token_ids: tokens that end a message, as they end answers.
        """
        assert cache.recurrent_states is not None, "the cache was made for a model with recurrent layers"
        block_tokens = cache.recurrent_states.block_tokens
        return cls(cache, LikelyPlaces(block_tokens, end_token_ids, keeps_for_choices=True))

    def arrived(self, request: Request) -> None:
        """See ``States.arrived``. Costs what ``KeptStates.arrived`` does."""
        self._kept.arrived(request)

    def left(self, request: Request) -> None:
        """See ``States.left``. Costs what ``KeptStates.left`` does."""
        self._kept.left(request)

    def is_awaited(self, request: Request) -> bool:
        """See ``States.is_awaited``. Costs what ``KeptStates.is_awaited`` does."""
        return self._kept.is_awaited(request)

    def plan_row(self, request: Request, start: int, end: int, n_in_tree: int) -> None:
        """See ``States.plan_row``. Costs what ``KeptStates.plan_row`` does."""
        source = request.blocks.state
        if source is not None:
            self._loads.append(StateLoad(source.slot, request.batch_slot))
            self._held.append(source)
            if not request.is_canary:
                self._answer_ends.repeated.note(source, end, n_in_tree)
        for state in self._kept.plan_row(request, start, end, n_in_tree):
            self._saves.append(StateSave(request.batch_slot, state.n_tokens, state.slot))
            self._states.hold(state)
            self._held.append(state)

    def plan_decode(self, requests: Sequence[Request]) -> None:
        """See ``States.plan_decode``. Costs what ``AnswerEnds.plan_decode`` does."""
        self._saves += self._answer_ends.plan_decode(requests)

    def forked(self, parent: Request, fork: Request) -> None:
        """See ``States.forked``: the next plan copies the state, because the parent's next row changes it. O(1)."""
        self._forks.append((StateFork(parent.batch_slot, fork.batch_slot), fork))

    def take(self, step: int) -> tuple[tuple[StateLoad, ...], tuple[StateSave, ...], tuple[StateFork, ...]]:
        """See ``States.take``. O(states)."""
        if not (self._loads or self._saves or self._forks):
            return (), (), ()
        self._kept.launched(step)
        self._answer_ends.launched(step)
        loads, saves = tuple(self._loads), tuple(self._saves)
        forks = tuple([fork for fork, _ in self._forks])
        self._held_by[step] = self._held
        self._forked_by[step] = [request for _, request in self._forks]
        self._loads, self._saves, self._held, self._forks = [], [], [], []
        return loads, saves, forks

    def step_done(self, plan: StepPlan, are_right: Sequence[bool]) -> None:
        """See ``States.step_done``. O(rows), if the step has saved states."""
        self._forked_by.pop(plan.step, None)
        for state in self._held_by.pop(plan.step, ()):
            self._states.let_go(state)
        self._kept.step_done(plan, are_right)
        self._answer_ends.step_done(plan.step)

    def ended(self, request: Request) -> None:
        """See ``States.ended``. Costs what ``AnswerEnds.ended`` does."""
        self._answer_ends.ended(request)

    def freed(self, request: Request) -> None:
        """See ``States.freed``. Costs what ``KeptStates.freed`` does."""
        self._kept.freed(request)
        self._answer_ends.freed(request)

    def undo(self) -> list[Request]:
        """See ``States.undo``. O(states + forks)."""
        for held in self._held_by.values():
            for state in held:
                self._states.let_go(state)
        self._held_by.clear()
        self._kept.undo()
        self._answer_ends.undo()
        forks = [fork for forks in self._forked_by.values() for fork in forks if fork.phase is Phase.RUNNING]
        self._forked_by.clear()
        return forks

    def stats(self) -> StateStats:
        """See ``States.stats``. O(states that have left)."""
        states = self._states
        return StateStats(
            n_slots=states.n_slots,
            n_slots_free=states.n_free,
            saved_total=states.n_saved,
            hits_total=self._kept.n_hits,
            evicted_total=states.n_evicted,
            missed_tokens_total=self._kept.n_missed_tokens,
        )
