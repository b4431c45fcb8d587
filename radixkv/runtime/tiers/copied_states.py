"""The states of a cache as copies between tiers see them: of recurrent layers in slots, or of windows in pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.cache.window_pages import WindowPages
from radixkv.runtime.cache.window_table import WindowTable
from radixkv.tree.node import Lease, State
from radixkv.tree.states import NodeStates


@dataclass(slots=True, eq=False)
class HeldState:
    """A state that is copied from a cache, and keeps its memory meanwhile."""

    state: State
    parts: dict[int, int]
    """Where the cache has each part of it, by the entry of the block table that the part follows or belongs to: the
    slot of a recurrent state, which has one part, or the window page of each entry."""
    window: WindowTable = field(default_factory=WindowTable)
    """Holds the window pages."""


@dataclass(slots=True, eq=False)
class ReservedState:
    """Room in a cache for a state that a copy brings; nothing finds the state before."""

    n_tokens: int
    """Position of the state."""
    slot: int
    """The slot of the tree's state, which is reserved."""
    parts: dict[int, int]
    """Where the cache will have each part that is to be copied, as in ``HeldState``. It has the others already."""
    window: WindowTable = field(default_factory=WindowTable)
    """Holds the window pages, also those that are not copied."""
    is_turn: bool = False
    """Whether the state is that of a turn where it is copied from, see ``State``; False if that is not known."""

    def pairs(self, source: HeldState) -> list[tuple[int, int]]:
        """Returns source and destination of each part that is copied. O(parts)."""
        return [(source.parts[entry], part) for entry, part in self.parts.items()]


class CopiedStates(Protocol):
    """The states of one cache, which are copied with pages."""

    pages_per_part: int
    """Pages whose bytes a part of a state takes."""
    max_parts: int
    """Most parts of a state. They are those of the last entries of the block table before it."""
    max_pages_lost: int
    """How many pages fewer the cache can have, at most, while it has a state."""

    def n_pages_with(self, n_new: int) -> int:
        """Returns how many pages a copy of ``n_new`` pages and the state after them takes at least: these, and
        those in whose place parts of the state are."""
        return n_new + min(n_new * self.pages_per_part, self.max_pages_lost)

    def hold(self, state: State) -> HeldState:
        """Keeps the memory of a state until ``let_go``, also where the state leaves the tree. O(parts)."""

    def let_go(self, held: HeldState) -> None:
        """Ends a ``hold``. O(parts)."""

    def reserve(
        self, lease: Lease, n_tokens: int, beside: Sequence[ReservedState] = (), *, spares_waiting: bool = False
    ) -> ReservedState | None:
        """Makes room for a state that is to be copied.

        Args:
            lease: on the pages before it that the cache has.
            n_tokens: its position.
            beside: those of the same copy, whose window pages may be its own.
            spares_waiting: whether pages that an upcoming prompt needs are not evicted for it.

        Returns:
            None if there is no room.
        """

    def reserve_unneeded(self, lease: Lease, n_tokens: int) -> ReservedState | None:
        """Does what ``reserve`` does, where no upcoming prompt needs the room, and no retained prefix."""

    def attach(self, reserved: ReservedState, lease: Lease) -> State | None:
        """Puts a state whose copy has ended into the tree, with ``NodeStates.attach``: returns what that does."""

    def give_back(self, reserved: ReservedState) -> None:
        """Gives up the room of a state whose copy has failed or is of no use. O(parts)."""


class CopiedSlots(CopiedStates):
    """States of recurrent layers.

    Args:
        cache: has states.
        states: of its tree.
        pages_per_part: see ``CopiedStates``.
    """

    max_parts = 1
    max_pages_lost = 0

    def __init__(self, cache: PageCache, states: NodeStates, pages_per_part: int) -> None:
        self._cache, self._states, self.pages_per_part = cache, states, pages_per_part

    def hold(self, state: State) -> HeldState:
        """See ``CopiedStates``."""
        self._states.hold(state)
        return HeldState(state, {self._last_entry(state.n_tokens): state.slot})

    def let_go(self, held: HeldState) -> None:
        """See ``CopiedStates``."""
        self._states.let_go(held.state)

    def reserve(
        self, lease: Lease, n_tokens: int, beside: Sequence[ReservedState] = (), *, spares_waiting: bool = False
    ) -> ReservedState | None:
        """See ``CopiedStates``."""
        return self._reserved(n_tokens, self._states.reserve(lease.namespace))

    def reserve_unneeded(self, lease: Lease, n_tokens: int) -> ReservedState | None:
        """See ``CopiedStates``."""
        waiting = self._cache.upcoming_prompts()
        return self._reserved(n_tokens, self._cache.tree.reserve_unneeded_state(lease.namespace, waiting))

    def attach(self, reserved: ReservedState, lease: Lease) -> State | None:
        """See ``CopiedStates``."""
        return self._states.attach(lease, reserved.n_tokens, reserved.slot, is_turn=reserved.is_turn, is_copy=True)

    def give_back(self, reserved: ReservedState) -> None:
        """See ``CopiedStates``."""
        self._states.give_back(reserved.slot)

    def _reserved(self, n_tokens: int, slot: int | None) -> ReservedState | None:
        return None if slot is None else ReservedState(n_tokens, slot, {self._last_entry(n_tokens): slot})

    def _last_entry(self, n_tokens: int) -> int:
        return n_tokens // self._cache.page_size - 1


class CopiedTails(CopiedStates):
    """Window tails: a reserved one shares pages that other tails of the sequence have; only others are copied.

    Args:
        cache: has tails.
        states: of its tree.
        windows: its window pages.
    """

    def __init__(self, cache: PageCache, states: NodeStates, windows: WindowPages) -> None:
        self._cache, self._states, self._windows = cache, states, windows
        self.pages_per_part = windows.slabs.pages_per_slab
        self.max_parts = -(-(windows.window - 1) // cache.page_size)
        self.max_pages_lost = self.max_parts * self.pages_per_part

    def hold(self, state: State) -> HeldState:
        """See ``CopiedStates``."""
        table = self._windows.open_copied(state)
        return HeldState(state, dict(enumerate(table.pages, table.first)), table)

    def let_go(self, held: HeldState) -> None:
        """See ``CopiedStates``."""
        self._windows.close_copied(held.window)

    def reserve(
        self, lease: Lease, n_tokens: int, beside: Sequence[ReservedState] = (), *, spares_waiting: bool = False
    ) -> ReservedState | None:
        """See ``CopiedStates``."""
        known: dict[int, int] = {}
        for state in self._states.on_path(lease):
            end = state.n_tokens // self._cache.page_size
            known |= dict(enumerate(state.pages, end - len(state.pages)))
        for one in beside:
            known |= dict(enumerate(one.window.pages, one.window.first))
        table = self._windows.reserve_tail(self._cache, n_tokens, known, spares_waiting=spares_waiting)
        if table is None:
            return None
        slot = self._states.reserve(lease.namespace)
        if slot is None:
            self._windows.close_copied(table)
            return None
        copied = {entry: page for entry, page in enumerate(table.pages, table.first) if known.get(entry) != page}
        return ReservedState(n_tokens, slot, copied, table)

    def reserve_unneeded(self, lease: Lease, n_tokens: int) -> ReservedState | None:
        """See ``CopiedStates``."""
        return self.reserve(lease, n_tokens, spares_waiting=True)

    def attach(self, reserved: ReservedState, lease: Lease) -> State | None:
        """See ``CopiedStates``."""
        state = self._states.attach(lease, reserved.n_tokens, reserved.slot, is_turn=reserved.is_turn, is_copy=True)
        if state is not None and not state.pages:
            self._windows.keep(reserved.window, state)
        self._windows.close_copied(reserved.window)
        return state

    def give_back(self, reserved: ReservedState) -> None:
        """See ``CopiedStates``."""
        self._states.give_back(reserved.slot)
        self._windows.close_copied(reserved.window)


def copied_states(cache: PageCache, n_state_pages: int) -> CopiedStates | None:
    """Returns the states of a cache; None if its model has none.

    Args:
        cache: of any tier.
        n_state_pages: pages whose bytes a state of recurrent layers takes.
    """
    states = cache.tree.states
    if states is None:
        return None
    if isinstance(cache.window_pages, WindowPages):
        return CopiedTails(cache, states, cache.window_pages)
    return CopiedSlots(cache, states, n_state_pages)
