"""Window tails: the window pages before a position of the tree. See docs/decisions/0069-window-pages.md."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.cache.window_pages import WindowPages
from radixkv.runtime.protocols.states import States
from radixkv.runtime.request import Request
from radixkv.runtime.states.kept_states import KeptStates
from radixkv.runtime.states.places import LikelyPlaces
from radixkv.runtime.step.plan import StateFork, StateLoad, StateSave, StepPlan
from radixkv.wire.stats import WindowStats


class WindowTails(States):
    """Lets states of the tree hold the window pages before them: at ``LikelyPlaces``, and where answers end.

    Nothing is copied, and forks share their parents' window pages.

    Args:
        cache: the page cache, whose tree has states.
        window_pages: of that cache.
        end_token_ids: tokens that end a message, as they end answers.
    """

    def __init__(self, cache: PageCache, window_pages: WindowPages, end_token_ids: frozenset[int]) -> None:
        assert cache.tree.states is not None, "the cache was made for a model with window pages"
        self._states = cache.tree.states
        self._window_pages = window_pages
        self.block_tokens = self._states.block_tokens
        places = LikelyPlaces(self.block_tokens, end_token_ids, keeps_for_choices=False)
        self._kept = KeptStates(self._states, places)

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
        """See ``States.plan_row``. ``KeptStates.plan_row``, and O(pages of a window) for each tail."""
        for state in self._kept.plan_row(request, start, end, n_in_tree):
            self._window_pages.keep(request.blocks.window, state)

    def take(self, step: int) -> tuple[tuple[StateLoad, ...], tuple[StateSave, ...], tuple[StateFork, ...]]:
        """See ``States.take``: nothing is copied. O(1)."""
        self._kept.launched(step)
        return (), (), ()

    def step_done(self, plan: StepPlan, are_right: Sequence[bool]) -> None:
        """See ``States.step_done``. O(rows), if the step has computed tails."""
        self._kept.step_done(plan, are_right)

    def ended(self, request: Request) -> None:
        """See ``States.ended``: keeps a tail where an answer ends, which needs no step. O(pages of a window)."""
        blocks = request.blocks
        if blocks.lease is None or request.is_canary:
            return
        position = blocks.lease.n_tokens
        has_window = self._window_pages.reaches(blocks.window, position)
        if blocks.can_commit and blocks.is_computed and position and has_window:
            state = self._states.put(blocks.lease, position, is_turn=True)
            if state is not None:
                self._window_pages.keep(blocks.window, state)
                self._states.computed(state)

    def freed(self, request: Request) -> None:
        """See ``States.freed``. Costs what ``KeptStates.freed`` does."""
        self._kept.freed(request)

    def undo(self) -> list[Request]:
        """See ``States.undo``. O(tails)."""
        self._kept.undo()
        return []

    def window_stats(self) -> WindowStats:
        """See ``States.window_stats``. O(tails that have left)."""
        states = self._states
        return self._window_pages.stats(
            n_tails=states.n_slots - states.n_free,
            tails_kept_total=states.n_saved,
            hits_total=self._kept.n_hits,
            evicted_total=states.n_evicted,
            missed_tokens_total=self._kept.n_missed_tokens,
        )
