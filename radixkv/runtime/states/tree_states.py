"""Which states the tree keeps. See docs/decisions/0066-states-of-delta-nets.md and 0069-window-pages.md."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.protocols import States
from radixkv.runtime.request import Phase, Request
from radixkv.runtime.step.plan import StateFork, StateLoad, StateSave, StepPlan
from radixkv.tree.node import State
from radixkv.wire.stats import StateStats, WindowStats

_MIN_AWAITED_BLOCKS = 2
"""A prompt waits a step for a state if that saves so many blocks or more: fewer save less than a step takes."""


class TreeStates(States):
    """Keeps the states from which later prompts are likely to go on, at the multiples of a block at or below them:

    - where the prompt forks off from what is cached: the next prompt that does so finds a state there;
    - the end of the first message of a chat, which often has instructions and tools;
    - the end of the last message, where the next turn of the chat goes on, whatever the template does with answers;
      without messages the end of the prompt;
    - the end of a prompt with several choices, where all but the first go on;
    - with window pages the end of the answer, because that costs no copy.

    A state of a last message is evicted before all others once the next turn of the chat has gone on from it.

    Args:
        cache: the page cache, whose tree has states. With window pages they are tails: nothing is copied.
        end_token_ids: tokens that end a message, as they end answers.
    """

    def __init__(self, cache: PageCache, end_token_ids: frozenset[int]) -> None:
        assert cache.tree.states is not None, "the cache was made for a model with states"
        self._states = cache.tree.states
        self._window_pages = cache.window_pages
        self.block_tokens = self._states.block_tokens
        self._end_token_ids = sorted(end_token_ids)
        self._loads: list[StateLoad] = []
        self._saves: list[StateSave] = []
        self._coming: list[tuple[int, State]] = []
        """The states that rows of the next plan compute, each with the row's batch slot."""
        self._launched: dict[int, list[tuple[int, State]]] = {}
        """The same of each launched step, by its number."""
        self._held: list[State] = []
        """The states that rows of the next plan read or write in the device: each keeps its slot until they have,
        because a copy from another tier could overwrite it at once."""
        self._held_by: dict[int, list[State]] = {}
        """The same of each launched step, by its number."""
        self._forks: list[tuple[StateFork, Request]] = []
        """The forks that get their states with the next plan."""
        self._forked_by: dict[int, list[Request]] = {}
        """The forks that get their states with each launched step, by its number."""
        self._found_until: dict[int, int] = {}
        """By batch slot, where its newest row ends, if the tree had all of its pages before."""
        self._ends: dict[int, tuple[tuple[str, int], tuple[int, int]]] = {}
        """By batch slot, the id and length of its newest prompt, and where that one's messages end."""
        self._n_hits = self._n_missed_tokens = 0

    def is_awaited(self, request: Request) -> bool:
        """See ``States.is_awaited``. ``NodeStates.n_coming``."""
        if not request.reads_cache or request.recovery.bypasses_tree:
            return False
        n_saved = self._states.n_coming(request.namespace, request.key)
        return n_saved >= _MIN_AWAITED_BLOCKS * self.block_tokens

    def plan_row(self, request: Request, start: int, end: int, n_in_tree: int) -> None:
        """See ``States.plan_row``. ``places``, and ``NodeStates.put`` for each state."""
        blocks, source = request.blocks, request.blocks.state
        if source is not None:
            if not self._window_pages.exist:
                self._loads.append(StateLoad(source.slot, request.batch_slot))
                self._held.append(source)
            blocks.state = None
            self._n_hits += not request.is_canary
        if blocks.lease is None or blocks.lease.detached or request.is_canary:
            return
        if request.reads_cache:
            self._n_missed_tokens += max(0, self._floor(n_in_tree) - start)
        if source is not None:
            self._states.use(source)
        n_before = len(self._coming)
        for position, is_turn in sorted(self.places(request, start, end, n_in_tree).items()):
            if max(start, 1) <= position <= end:
                state = self._states.put(blocks.lease, position, is_turn=is_turn)
                if state is not None:
                    self._coming.append((request.batch_slot, state))
                    if self._window_pages.exist:
                        self._window_pages.keep(blocks.window, state)
                    else:
                        self._saves.append(StateSave(request.batch_slot, position, state.slot))
                        self._states.hold(state)
                        self._held.append(state)
        if source is not None and source.is_turn and len(self._coming) > n_before:
            self._states.demote(source)

    def places(self, request: Request, start: int, end: int, n_in_tree: int) -> dict[int, bool]:
        """Returns the positions of the states to keep of a prompt, in its row or not, and whether each is that of a
        turn, see ``State``. Takes the arguments of ``plan_row``. O(1), and O(tokens) for the first row of a prompt.
        """
        first, last = self._message_ends(request)
        places = [first]
        if n_in_tree < end and (n_in_tree > start or self._found_until.get(request.batch_slot) == start):
            places.append(n_in_tree)
        self._found_until[request.batch_slot] = end if n_in_tree == end else 0
        has_choices = bool(request.followers) and not self._window_pages.exist
        turns = [last, request.n_prompt - 1] if has_choices else [last]
        return dict.fromkeys(map(self._floor, turns), True) | dict.fromkeys(map(self._floor, places), False)

    def forked(self, parent: Request, fork: Request) -> None:
        """See ``States.forked``: the next plan copies the state, because the parent's next row changes it. O(1)."""
        if not self._window_pages.exist:
            self._forks.append((StateFork(parent.batch_slot, fork.batch_slot), fork))

    def take(self, step: int) -> tuple[tuple[StateLoad, ...], tuple[StateSave, ...], tuple[StateFork, ...]]:
        """See ``States.take``. O(states)."""
        if not (self._loads or self._coming or self._forks):
            return (), (), ()
        loads, saves = tuple(self._loads), tuple(self._saves)
        forks = tuple([fork for fork, _ in self._forks])
        self._launched[step], self._held_by[step] = self._coming, self._held
        self._forked_by[step] = [request for _, request in self._forks]
        self._loads, self._saves, self._coming, self._held, self._forks = [], [], [], [], []
        return loads, saves, forks

    def step_done(self, plan: StepPlan, are_right: Sequence[bool]) -> None:
        """See ``States.step_done``. O(rows), if the step has saved states."""
        self._forked_by.pop(plan.step, None)
        for state in self._held_by.pop(plan.step, ()):
            self._states.let_go(state)
        states = self._launched.pop(plan.step, ())
        if not states:
            return
        is_right = {row.batch_slot: right for row, right in zip(plan.rows, are_right, strict=True)}
        for batch_slot, state in states:
            if is_right[batch_slot]:
                self._states.computed(state)
            else:
                self._states.drop(state)

    def ended(self, request: Request) -> None:
        """See ``States.ended``: keeps a tail where an answer ends, which needs no step. O(pages of a window)."""
        blocks, windows = request.blocks, self._window_pages
        if not windows.exist or blocks.lease is None or request.is_canary:
            return
        position = blocks.lease.n_tokens
        if blocks.can_commit and blocks.is_computed and position and windows.reaches(blocks.window, position):
            state = self._states.put(blocks.lease, position, is_turn=True)
            if state is not None:
                windows.keep(blocks.window, state)
                self._states.computed(state)

    def undo(self) -> list[Request]:
        """See ``States.undo``. O(states + forks)."""
        for held in self._held_by.values():
            for state in held:
                self._states.let_go(state)
        self._held_by.clear()
        for states in self._launched.values():
            for _, state in states:
                self._states.drop(state)
        self._launched.clear()
        forks = [fork for forks in self._forked_by.values() for fork in forks if fork.phase is Phase.RUNNING]
        self._forked_by.clear()
        return forks

    def stats(self) -> StateStats | None:
        """See ``States.stats``. O(states that have left)."""
        if self._window_pages.exist:
            return None
        states = self._states
        return StateStats(
            n_slots=states.n_slots,
            n_slots_free=states.n_free,
            saved_total=states.n_saved,
            hits_total=self._n_hits,
            evicted_total=states.n_evicted,
            missed_tokens_total=self._n_missed_tokens,
        )

    def window_stats(self) -> WindowStats | None:
        """See ``States.window_stats``. O(states that have left)."""
        states = self._states
        return self._window_pages.stats(
            n_tails=states.n_slots - states.n_free,
            tails_kept_total=states.n_saved,
            hits_total=self._n_hits,
            evicted_total=states.n_evicted,
            missed_tokens_total=self._n_missed_tokens,
        )

    def _floor(self, position: int) -> int:
        return position - position % self.block_tokens

    def _message_ends(self, request: Request) -> tuple[int, int]:
        """Returns where the first and the last message of a prompt end; without messages 0 and its end."""
        prompt = request.id, request.n_prompt
        known, ends = self._ends.get(request.batch_slot, (None, (0, 0)))
        if known != prompt:
            ends = self._find_message_ends(request)
            self._ends[request.batch_slot] = prompt, ends
        return ends

    def _find_message_ends(self, request: Request) -> tuple[int, int]:
        ids = np.frombuffer(request.tokens, "<i4", request.n_prompt)
        ends = np.flatnonzero(np.isin(ids, self._end_token_ids)) + 1
        last = request.n_prompt - 1  # the last token of a prompt is always computed
        return (int(ends[0]), min(int(ends[-1]), last)) if len(ends) else (0, last)
