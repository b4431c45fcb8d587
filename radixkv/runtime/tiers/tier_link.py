"""The link between a tier and the one below it: copies of pages both ways, from offer to end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.tiers.copied_states import CopiedStates, HeldState, ReservedState
from radixkv.runtime.tiers.stores.page_store import FinishedTransfer
from radixkv.tree.node import TOKEN_BYTES, Namespace, State

MAX_OFFERS = 4096
"""Offers that wait for their copy; beyond them the oldest is dropped. A later request for the same tokens offers
them again."""
MAX_POSTPONED_BYTES = 64 << 20
"""Bytes of tokens of the offers that wait for room; beyond them the oldest is dropped."""
_NO_TOKEN = b"\xff" * TOKEN_BYTES
"""A token that no sequence has."""
MAX_OFFERS_PER_TURN = 32
"""Offers looked at in one turn, which bounds its length: a batch of requests may offer all its prompts at once."""


class LowerPages(Protocol):
    """The lower tier's pages of a sequence. It drops none of them as long as they are open."""

    @property
    def can_commit(self) -> bool:
        """Whether the pages can still be found: nothing has removed them since they were opened."""


P = TypeVar("P", bound=LowerPages)
L = TypeVar("L", bound="Load[Any]")


class Offer(NamedTuple):
    """A sequence whose pages in the upper tier are worth a copy in the lower one."""

    namespace: Namespace
    tokens: bytes
    """Little-endian int32; a last page that they do not fill is left out."""
    on_stored: Callable[[Namespace, bytes], None] | None = None
    """Called with namespace and tokens once the lower tier has what it has room for of the computed pages."""

    def begins(self, other: Offer) -> bool:
        """Returns whether another offer has all pages of this one."""
        return self.namespace == other.namespace and other.tokens.startswith(self.tokens)

    def report(self) -> None:
        """Tells whoever made the offer that the lower tier has its pages."""
        if self.on_stored is not None:
            self.on_stored(self.namespace, self.tokens)


class PostponedOffers:
    """Offers in the order in which they were postponed, of at most ``MAX_POSTPONED_BYTES`` of tokens."""

    def __init__(self) -> None:
        self._offers = deque[Offer]()
        self._n_bytes = 0
        """Bytes of all tokens."""

    def __len__(self) -> int:
        return len(self._offers)

    def __iter__(self) -> Iterator[Offer]:
        return iter(self._offers)

    def add(self, offer: Offer) -> None:
        """Adds an offer; the oldest ones are dropped if it makes too many bytes. O(1) beside these."""
        self._offers.append(offer)
        self._n_bytes += len(offer.tokens)
        while self._n_bytes > MAX_POSTPONED_BYTES:
            self.pop()

    def drop_beginnings(self, offer: Offer) -> None:
        """Drops what an offer has all pages of, unless somebody is to be told when it is stored. O(offers)."""
        kept = [one for one in self._offers if one.on_stored is not None or not one.begins(offer)]
        self._offers = deque(kept)
        self._n_bytes = sum(len(one.tokens) for one in kept)

    def pop(self) -> Offer:
        """Removes and returns the oldest offer. O(1)."""
        offer = self._offers.popleft()
        self._n_bytes -= len(offer.tokens)
        return offer

    def clear(self) -> None:
        """Drops all offers."""
        self._offers.clear()
        self._n_bytes = 0


class StateCopy(NamedTuple):
    """A state that a store copies."""

    source: HeldState
    """What the upper tier has."""
    reserved: ReservedState | None
    """The room for it in the lower tier, if that is a cache."""


@dataclass(slots=True, eq=False)
class Store(Generic[P]):
    """A copy of a sequence's pages to the lower tier."""

    offer: Offer
    tokens: bytearray
    """Tokens of the pages that the lower tier will have, from the start of the sequence."""
    blocks: BlockTable
    """Lease on the upper tier's pages."""
    lower: P
    pages: list[int]
    """Pages of the upper tier that are copied: the last of ``tokens``."""
    states: list[StateCopy] = field(default_factory=list)
    """The upper tier's states that are copied, the deepest first."""
    n_more: int = 0
    """Pages whose bytes these take."""
    n_counted: int = 0
    """Pages of it that count as being stored: those that other stores are copying already count there."""

    @property
    def n_pages(self) -> int:
        """Pages to copy."""
        return len(self.pages) + self.n_more


@dataclass(slots=True, eq=False)
class Load(Generic[P]):
    """A copy of a sequence's pages from the lower tier, for one request and those that join it."""

    namespace: Namespace
    tokens: bytearray
    """Tokens of the pages that the upper tier will have, from the start of the sequence."""
    blocks: BlockTable
    """The upper tier's pages. Those after the leased ones belong to the copy until it is done."""
    lower: P
    start: int
    """Tokens before those that are copied."""
    pages: list[int]
    """Pages of the upper tier to which is copied."""
    state: ReservedState | None = None
    """Where the upper tier will have the state after ``tokens``; None without one, and once the copy is done."""
    n_more: int = 0
    """Pages whose bytes it takes."""
    is_wanted: bool = False
    """Whether a request waits for it, and has ``blocks`` then. If not, ``blocks`` is closed when it is done."""
    is_done: bool = False
    has_failed: bool = False
    """Whether some of the pages could not be copied."""
    is_lost: bool = False
    """Whether the upper tier lacks pages of it: the copy has failed, or its source was removed."""
    n_tokens: int = 0
    """Tokens that were copied from what was not removed, once it is done."""

    @property
    def n_pages(self) -> int:
        """Pages to copy."""
        return len(self.pages) + self.n_more

    @property
    def is_found(self) -> bool:
        """Whether nothing has removed from the lower tier what it copies."""
        return self.lower.can_commit

    @property
    def may_be_joined(self) -> bool:
        """Whether what it copies can still be found, so that another request may wait for it."""
        return self.is_found


@dataclass(slots=True)
class LinkCounters:
    """What a link has done since the start."""

    n_pages_loaded: int = 0
    load_seconds: float = 0.0
    """Time of the copies themselves, as of ``store_seconds``."""
    n_pages_stored: int = 0
    store_seconds: float = 0.0
    n_failed: int = 0
    """Loads and stores with a page that has failed."""


@dataclass(slots=True, eq=False)
class TierLink(ABC, Generic[P, L]):
    """Copies pages of offered sequences to the tier below, and back when a prompt needs them.

    The pages of a copy are private to a block table until it has finished, and only then are they committed.
    A subclass says what the lower tier is: how it makes room, and what copies from it and to it.
    """

    upper: PageCache = field(init=False)
    """The cache of the upper tier."""
    upper_states: CopiedStates | None = field(init=False)
    """Its states; None if the model has none."""
    _max_pages_in_store: int = field(init=False)
    """No store begins while this many pages, or one ``_upper_part``-th of the upper tier's if that is fewer, are
    being stored: they cannot be evicted meanwhile. The last store may exceed it."""
    _upper_part: int = field(init=False)
    counters: LinkCounters = field(default_factory=LinkCounters, init=False)
    _loads: dict[int, L] = field(default_factory=dict, init=False)
    """Loads in flight, by ticket."""
    _stores: dict[int, Store[P]] = field(default_factory=dict, init=False)
    """Stores in flight, by ticket."""
    _offers: deque[Offer] = field(default_factory=deque, init=False)
    """Offers that wait for their turn."""
    _postponed: PostponedOffers = field(default_factory=PostponedOffers, init=False)
    """Offers for which the lower tier could not make room yet."""
    _n_pages_in_store: int = field(default=0, init=False)

    @property
    def n_offers(self) -> int:
        """Offers that wait for their copy."""
        return len(self._offers) + len(self._postponed)

    def block_tables(self) -> Iterator[BlockTable]:
        """Yields the upper tier's block tables that belong to copies in flight and to no waiting request."""
        yield from (load.blocks for load in self._loads.values() if not load.is_wanted)
        yield from (store.blocks for store in self._stores.values())

    def offer(
        self, namespace: Namespace, tokens: bytes, on_stored: Callable[[Namespace, bytes], None] | None = None
    ) -> None:
        """Queues a sequence, so that its computed pages are copied to the lower tier. O(1) beside the tokens' copy.

        Args:
            namespace: namespace of the sequence.
            tokens: the sequence; a last page that they do not fill is left out.
            on_stored: called with both once the lower tier has the pages that are computed, or the leading ones for
                which it has room; not if that fails.
        """
        if self.n_offers >= MAX_OFFERS:
            self._postponed.pop() if self._postponed else self._offers.popleft()
        self._offers.append(Offer(namespace, tokens, on_stored))

    def find_load(self, namespace: Namespace, tokens: bytes, n_upper: int) -> L | None:
        """Returns a load in flight of the page after a prompt's first ``n_upper`` tokens, if there is one.

        O(loads in flight), and a comparison of the tokens.
        """
        n_least = (n_upper + self.upper.page_size) * TOKEN_BYTES
        for load in self._loads.values():
            is_same = load.namespace == namespace and load.may_be_joined
            n_bytes = n_least
            if load.state is not None:  # its pages are of use as a whole, and leave a token to compute
                n_bytes = max(n_least, len(load.tokens))
                is_same = is_same and n_bytes < len(tokens)
            if is_same and n_bytes <= len(load.tokens) and tokens[:n_bytes] == load.tokens[:n_bytes]:
                return load
        return None

    def is_storing(self, namespace: Namespace, tokens: bytes, n_lower: int) -> bool:
        """Returns whether the page after a prompt's first ``n_lower`` tokens is offered or on its way.

        O(tokens + stores and offers): that page is compared first, so that offers with a common prefix cost no
        more. Without a whole page after them O(1).
        """
        start, end = n_lower * TOKEN_BYTES, (n_lower + self.upper.page_size) * TOKEN_BYTES
        if len(tokens) < end:
            return False
        beginning, page = tokens[:end], tokens[start:end]
        stores = (store.offer for store in self._stores.values())
        return any(
            offer.namespace == namespace
            and offer.tokens.startswith(page, start)
            and offer.tokens.startswith(beginning)
            for offer in chain(self._offers, self._postponed, stores)
        )

    def leave(self, load: L) -> None:
        """Gives up a load. Its pages stay cached if the copy succeeds; if not, they are free then. O(pages)."""
        load.is_wanted = False
        if load.is_done:
            self.upper.close(load.blocks)

    def _end(self, finished: Iterable[FinishedTransfer]) -> bool:
        """Ends copies, and ignores tickets of anything else; returns whether a load was among them. O(pages)."""
        has_loaded = False
        for one in finished:
            if (load := self._loads.pop(one.ticket, None)) is not None:
                self._end_load(load, one)
                has_loaded = True
            elif (store := self._stores.pop(one.ticket, None)) is not None:
                self._end_store(store, one)
        return has_loaded

    def _start_stores(self) -> None:
        """Starts stores of offers, oldest first, as long as few enough pages are in flight."""
        max_pages = self._max_in_store
        for _ in range(min(MAX_OFFERS_PER_TURN, len(self._offers))):
            if self._n_pages_in_store >= max_pages:
                break
            self._start_store(self._offers.popleft())

    @property
    def _max_in_store(self) -> int:
        """No store begins while this many pages are being stored."""
        return max(1, min(self._max_pages_in_store, self.upper.n_pages // self._upper_part))

    def _end_load(self, load: L, finished: FinishedTransfer) -> None:
        n_pages, is_found = finished.n_pages, load.is_found
        load.is_done, load.has_failed = True, n_pages < load.n_pages
        load.is_lost = load.has_failed or not is_found
        load.n_tokens = min(n_pages, len(load.pages)) * self.upper.page_size if is_found else 0
        self.counters.load_seconds += finished.seconds
        self.counters.n_pages_loaded += n_pages
        self.counters.n_failed += load.has_failed
        self._take_load(load, finished)
        if load.n_tokens:
            self.upper.commit_copied(load.blocks, load.tokens, load.start + load.n_tokens)
        if load.state is not None:
            self._attach(load, load.state)
        if not load.is_wanted:
            self.upper.close(load.blocks)

    def _attach(self, load: L, reserved: ReservedState) -> None:
        """Puts the state of a load into the upper tier's tree. Without any state there, the load is lost."""
        states, lease = self.upper_states, load.blocks.lease
        assert states is not None
        assert lease is not None
        if load.is_lost:
            states.give_back(reserved)
        else:
            state = states.attach(reserved, lease)
            load.is_lost = state is None
            if state is not None and load.is_wanted:
                self.upper.go_on_from(load.blocks, state)
        load.state = None

    def _end_store(self, store: Store[P], finished: FinishedTransfer) -> None:
        self.counters.store_seconds += finished.seconds
        self.counters.n_pages_stored += finished.n_pages
        self.counters.n_failed += finished.n_pages < store.n_pages
        self._n_pages_in_store -= store.n_counted
        self._let_go_states(store)
        if self._take_store(store, finished):
            store.offer.report()
        self._resume_postponed()
        self._close(store.blocks, store.lower, store.offer.namespace, bytes(store.tokens))

    def _let_go_states(self, store: Store[P]) -> None:
        if self.upper_states is not None:
            for state in store.states:
                self.upper_states.let_go(state.source)

    def _resume_postponed(self) -> None:
        """Lets postponed offers be tried again, after a store that has ended. O(these)."""
        self._offers.extendleft(reversed([*self._postponed]))
        self._postponed.clear()

    def _start_store(self, offer: Offer) -> None:
        """Starts the store of what the lower tier lacks of an offer: of the leading pages for which it has room.

        Where there are states, pages are of use up to one of them only: all up to the last one are stored, or none.
        """
        page_size = self.upper.page_size
        tokens_of_pages = offer.tokens[: len(offer.tokens) - len(offer.tokens) % (page_size * TOKEN_BYTES)]
        # A match leaves a token over for a state to be used on. A copy uses none, and the state may be at the end.
        blocks = self.upper.open(offer.namespace, tokens_of_pages + _NO_TOKEN, is_use=False)
        n_computed = 0 if blocks.lease is None else self.upper.tree.n_computed(blocks.lease) // page_size
        if self.upper.tree.states is not None and n_computed < len(blocks.pages):
            n_computed = 0
        lower, first, n_pages = self._make_room(offer, blocks.pages[:n_computed])
        if n_pages is not None:
            last = first + n_pages
            tokens = bytearray(offer.tokens[: last * page_size * TOKEN_BYTES])
            store = Store(offer, tokens, blocks, lower, blocks.pages[first:last])
            if self._add_states(store, is_whole=last == n_computed):
                store.n_counted = store.n_pages
                ticket = self._begin_store(store)
                if ticket is not None:
                    self._n_pages_in_store += store.n_counted
                    self._stores[ticket] = store
                    return
                self._let_go_states(store)
                n_pages = None
        self._close(blocks, lower, offer.namespace, offer.tokens)
        if n_pages is None:
            self._postponed.add(offer)
        else:
            offer.report()

    @abstractmethod
    def _make_room(self, offer: Offer, pages: Sequence[int]) -> tuple[P, int, int | None]:
        """Makes room for the copy of an offer.

        Args:
            offer: the offer.
            pages: its computed pages in the upper tier, from the start of the sequence.

        Returns:
            The lower tier's pages, to be closed; how many of the given ones it has; for how many of those after
            them it has room. None: the offer is to be tried again, see ``_resume_postponed``.
        """

    def _add_states(self, store: Store[P], *, is_whole: bool) -> bool:
        """Adds the states that are copied with the pages of a store; returns whether it is of use.

        Args:
            store: its pages are known.
            is_whole: whether all that the lower tier lacks is copied.
        """
        states, lease = self.upper.tree.states, store.blocks.lease
        if states is None:
            return bool(store.pages)
        if not is_whole or lease is None or not store.tokens:
            return False
        self._reserve(store, states.on_path(lease))
        return bool(store.states)

    @abstractmethod
    def _reserve(self, store: Store[P], states: Sequence[State]) -> None:
        """Makes room for states that the lower tier lacks, holds them, and sets ``states`` and ``n_more``.

        Args:
            store: the store.
            states: the upper tier's along its pages, the deepest first. If there is no room for that one, none are
                copied.
        """

    @abstractmethod
    def _begin_store(self, store: Store[P]) -> int | None:
        """Starts a copy for which there is room; returns a ticket. May lower ``n_counted``. O(pages).

        None: the offer is to be tried again, see ``_resume_postponed``.
        """

    @abstractmethod
    def _take_store(self, store: Store[P], finished: FinishedTransfer) -> bool:
        """Takes note of the end of a store; returns whether the lower tier has all its pages now."""

    @abstractmethod
    def _take_load(self, load: L, finished: FinishedTransfer) -> None:
        """Takes note of the end of a load, and closes the lower tier's pages. Then the upper tier gets its own."""

    @abstractmethod
    def _close(self, blocks: BlockTable, lower: P, namespace: Namespace, tokens: bytes) -> None:
        """Closes what a store has of both tiers."""
