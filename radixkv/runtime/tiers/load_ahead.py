"""Copies of what prompts will need, from lower tiers towards the device, before it is their turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from radixkv.runtime.protocols.returns import NeededPrompt
from radixkv.runtime.tiers.host_tier import HostLoad, HostTier
from radixkv.runtime.tiers.load_choice import CachedPrefixes
from radixkv.runtime.tiers.storage_tier import Fetch, Lookup
from radixkv.tree.node import TOKEN_BYTES, Namespace

WINDOW = 64
"""Prompts looked at in a round: those that are needed first. Ranking the queue takes as long as some 30 looks."""
MAX_LOADED_BYTES = 512 << 20
"""No load begins while so many bytes, or an eighth of the device's pages, are being loaded ahead: a request whose
turn it is has to wait for these copies. They take a hundredth of a second on a GPU."""
_MAX_HELD_PART = 4
"""One fourth of the pages of a tier has what was brought there ahead and not used yet, at most: the rest is for
what steps compute."""


@dataclass(slots=True, eq=False)
class Brought:
    """What was copied ahead for a prompt."""

    loaded: list[tuple[int, int]] = field(default_factory=list)
    """Positions that were loaded to the device, as ranges (first, last + 1)."""
    fetched: list[tuple[int, int]] = field(default_factory=list)
    """Positions that were fetched from disk or a shared store."""
    from_shared: list[tuple[int, int]] = field(default_factory=list)
    """The fetched positions that came from a shared store."""
    is_looked_up: bool = False
    """Whether a store that servers share was asked for its pages."""
    may_fetch: bool = True
    """Whether the disk may have more that is to be fetched ahead."""
    may_load: bool = True
    """Whether no load has failed."""


class LoadAhead:
    """Brings the pages that prompts will need closer to the device before a request with them can be admitted.

    In each turn it looks at the next prompt, in the order in which they are needed, and begins the copy that the
    request would begin when it is admitted: a fetch from disk or a shared store to the host tier, or a load from
    there to the device. Copies for requests whose turn it is come first: none begins beside them.

    Pages go where nobody needs room sooner: into free pages, or in place of cached ones that no waiting prompt
    needs and that are not pinned, beside what running and loading requests and the prompts before it still need.
    What was loaded is an ordinary cached sequence. A wait is no use of it: it is as old as the prefix before it. So
    nothing has to be undone when a request is aborted, and no lease outlives a copy.

    Args:
        host_tier: makes the copies.
        prompts: yields the prompts that are needed, the first one first.
    """

    def __init__(self, host_tier: HostTier, prompts: Callable[[], Iterable[NeededPrompt]]) -> None:
        self._host_tier = host_tier
        self._prompts = prompts
        self.n_unclaimed: Callable[[Namespace], int] = lambda namespace: 0
        """Returns how many pages a namespace's owner can have beside what running and loading requests need."""
        self.n_loaded = 0
        """Pages loaded ahead since the start."""
        self.n_used = 0
        """How many of these a request has used for which they were loaded."""
        self._brought: dict[NeededPrompt, Brought] = {}
        """By prompt, until it is settled or nothing is to be copied for it any more."""
        self._copies: dict[NeededPrompt, HostLoad | Fetch | Lookup] = {}
        """The copies in flight, or lookups of them."""
        self._round: list[tuple[NeededPrompt, bytes]] = []
        """The prompts that are looked at, and their keys. One that has another key by now may be that of a request
        whose turn is this one, because it has waited for a copy."""
        self._next = 0
        """Index of the one that is looked at next."""
        self._n_turns = 0
        """Turns since the round began."""
        self._n_needed = 0
        """Pages that those before it lack on the device."""
        self._is_full = False
        """Whether one of those before it has found too little room."""
        n_pages = host_tier.device.n_pages
        self._max_in_flight = max(1, min(MAX_LOADED_BYTES // host_tier.copier.page_bytes, n_pages // 8))
        self._max_held = n_pages // _MAX_HELD_PART

    def advance(self, *, may_begin: bool) -> None:
        """Takes note of copies that have ended, and begins others.

        Beside the copies' own cost it takes a match with device and host tier, and O(tokens) once for a prompt
        where there is a disk tier. A round of prompts lasts as many turns as it has prompts, at least.

        Args:
            may_begin: whether copies may begin: no request waits for one.
        """
        if self._copies:
            self._take_finished()
        self._n_turns += 1
        if not may_begin:
            return
        if self._next >= len(self._round):
            if self._n_turns > len(self._round):
                self._begin_round()
            return  # those that are new may be admitted in this turn
        has_begun = True
        while has_begun and self._next < len(self._round):
            prompt, key = self._round[self._next]
            if key and prompt.key is key:
                n_copies = len(self._copies)
                cached = self._host_tier.match(prompt.namespace, key)
                if not self._bring(prompt, cached):
                    break
                n_pages = self._host_tier.device.pages_for(len(key) // TOKEN_BYTES)
                self._n_needed += n_pages - cached.n_device // self._page_size
                has_begun = len(self._copies) > n_copies
            self._next += 1
        if self._is_full and self._host_tier.disk is None:
            self._next = len(self._round)

    def is_copying(self, prompt: NeededPrompt) -> bool:
        """Whether a copy for the prompt is in flight, or a lookup. O(1)."""
        return prompt in self._copies

    def has_looked_up(self, prompt: NeededPrompt) -> bool:
        """Whether a store that servers share was asked for the prompt's pages. O(1)."""
        return prompt in self._brought and self._brought[prompt].is_looked_up

    def settle(self, prompt: NeededPrompt, n_found: int) -> Brought | None:
        """Takes note that it is the prompt's turn; returns what was copied for it, None if nothing was. O(copies).

        Args:
            prompt: a prompt for which no copy is in flight.
            n_found: its leading tokens that the device has.
        """
        brought = self._brought.pop(prompt, None)
        if brought is not None:
            self.n_used += self._n_pages([[(first, min(last, n_found)) for first, last in brought.loaded]])
        return brought

    @property
    def _page_size(self) -> int:
        return self._host_tier.device.page_size

    def _n_pages(self, ranges: Iterable[list[tuple[int, int]]]) -> int:
        """Returns the pages of ranges of positions."""
        return sum(max(0, last - first) for one in ranges for first, last in one) // self._page_size

    def _take_finished(self) -> None:
        for prompt, copy in list(self._copies.items()):
            if not copy.is_done:
                continue
            del self._copies[prompt]
            brought = self._brought.get(prompt) or Brought()  # without one, a request has begun with what it found
            if isinstance(copy, Lookup):
                brought.is_looked_up = True
            elif isinstance(copy, Fetch):
                brought.fetched.append((copy.start, copy.start + copy.n_tokens))
                brought.from_shared += copy.from_shared
                brought.may_fetch = not copy.is_lost
            else:
                brought.loaded.append((copy.start, copy.start + copy.n_tokens))
                brought.may_load = not copy.is_lost
                self.n_loaded += copy.n_tokens // self._page_size

    def _begin_round(self) -> None:
        """Takes the prompts that are needed first, and forgets those for which nothing is to be copied any more."""
        self._brought = {
            prompt: brought for prompt, brought in self._brought.items() if prompt.key or prompt in self._copies
        }
        self._round = [(prompt, prompt.key) for prompt in islice(self._prompts(), WINDOW)]
        self._next = self._n_turns = self._n_needed = 0
        self._is_full = False

    def _bring(self, prompt: NeededPrompt, cached: CachedPrefixes) -> bool:
        """Begins a copy for a prompt, if it needs one; returns False if it is to be looked at again before others:
        once there is room for its load beside those in flight, or once its first part is loaded."""
        if prompt in self._copies or self._begin_fetch(prompt, cached):
            return True
        if self._is_full or not self._should_load(prompt, cached):
            return True
        device, has_states = self._host_tier.device, self._host_tier.upper_states is not None
        n_unclaimed = self.n_unclaimed(prompt.namespace) - self._n_needed
        n_held = self._n_pages(one.loaded for one in self._brought.values())
        n_in_flight = sum(copy.n_pages for copy in self._copies.values() if not isinstance(copy, (Fetch, Lookup)))
        n_all = cached.n_beyond_device // self._page_size
        n_pages = min(n_all, n_unclaimed, self._max_held - n_held - n_in_flight)
        if n_in_flight and n_in_flight + n_pages > self._max_in_flight:
            return False
        is_cut = n_pages > self._max_in_flight and not has_states
        if is_cut:
            n_pages = self._max_in_flight
        n_least = n_all if has_states else min(n_all, device.n_pages >> 7)  # pages are of use up to a state only
        has_room = n_pages >= max(1, n_least)
        self._is_full = not has_room or not self._begin_load(prompt, cached, n_pages, n_unclaimed)
        return self._is_full or not is_cut

    def _begin_fetch(self, prompt: NeededPrompt, cached: CachedPrefixes) -> bool:
        """Begins to fetch what disk or shared store have of a prompt, or to look that up; returns whether it did.

        One fetch or lookup is in flight at a time: one for a request whose turn it is would share its rate.
        """
        if self._host_tier.disk is None or any(isinstance(copy, (Fetch, Lookup)) for copy in self._copies.values()):
            return False
        page_bytes = self._page_size * TOKEN_BYTES
        brought = self._brought.get(prompt)
        if brought is None:
            if max(cached.n_device, cached.n_host) >= len(prompt.key) // page_bytes * self._page_size:
                return False
            brought = self._brought[prompt] = Brought()
        if brought.fetched and cached.n_host < brought.fetched[-1][1]:
            brought.fetched.clear()
            brought.from_shared.clear()
        n_held = self._n_pages(one.fetched for one in self._brought.values())
        if not brought.may_fetch or n_held >= self._host_tier.host.n_pages // _MAX_HELD_PART:
            return False
        copy = self._host_tier.find_fetch(
            prompt.namespace, prompt.key, cached, looks_up=not brought.is_looked_up, is_ahead=True
        )
        if copy is None:
            brought.may_fetch = False
            return False
        self._copies[prompt] = copy
        return True

    def _should_load(self, prompt: NeededPrompt, cached: CachedPrefixes) -> bool:
        """Returns whether pages are to be loaded for a prompt.

        Not if a load has failed, nor if pages that were loaded before are gone: others have needed
        the room more.
        """
        brought = self._brought.get(prompt)
        if brought is not None and not brought.may_load:
            return False
        if brought is not None and brought.loaded and cached.n_device < brought.loaded[-1][1]:
            brought.loaded.clear()  # it holds nothing any more
            brought.may_load = False
            return False
        host_tier = self._host_tier
        is_loading = host_tier.find_load(prompt.namespace, prompt.key, cached.n_device) is not None
        return not is_loading and host_tier.choice.should_load(cached)

    def _begin_load(self, prompt: NeededPrompt, cached: CachedPrefixes, n_pages: int, n_unclaimed: int) -> bool:
        """Begins to load the next pages that the host tier has of a prompt; returns whether it did.

        Args:
            prompt: the prompt.
            cached: its cached prefixes.
            n_pages: how many pages, with states all that there are.
            n_unclaimed: pages that nobody needs sooner.
        """
        host_tier, tokens = self._host_tier, prompt.key
        if host_tier.upper_states is None:
            cached = cached._replace(n_host=cached.n_device + n_pages * self._page_size)
            tokens = tokens[: cached.n_host * TOKEN_BYTES]
        if not host_tier.choice.should_load(cached):
            return False
        n_kept = host_tier.device.n_available_to(prompt.namespace) - n_unclaimed
        load = host_tier.begin_load(prompt.namespace, tokens, n_kept=n_kept, ahead_of=prompt.key)
        if load is None:
            return False
        self._brought.setdefault(prompt, Brought())
        self._copies[prompt] = load
        return True
