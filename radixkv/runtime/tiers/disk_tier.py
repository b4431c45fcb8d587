"""The disk tier or a shared store: pages of the host tier that a page store keeps, until they are fetched back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.tiers.load_cost import LoadCost
from radixkv.runtime.tiers.stores.disk_changes import DiskChanges
from radixkv.runtime.tiers.stores.page_keys import KeyChain, namespace_key
from radixkv.runtime.tiers.stores.page_store import FinishedTransfer, PageStore
from radixkv.tree.node import TOKEN_BYTES, Namespace
from radixkv.tree.spared import WaitingPrompt

_MAX_WRITTEN_BYTES = 256 << 20
"""No write begins while so many bytes, or 1/4 of the host tier, are being written: they hold their slots. The last
write may exceed it."""
_MAX_OFFERS = 4096
"""Offers that wait to be written; beyond them the oldest is dropped."""
_MAX_OFFERS_PER_TURN = 32
"""Offers and waiting prompts looked at in one turn, which bounds its length: keys of each are computed."""


class _Offer(NamedTuple):
    namespace: Namespace
    tokens: bytes
    """Whole pages, from the start of the sequence."""


@dataclass(slots=True, eq=False)
class Fetch:
    """A copy of a sequence's pages from the store to the host tier."""

    namespace: Namespace
    tokens: bytearray
    """Tokens of the pages that the host tier will have, from the start of the sequence."""
    blocks: BlockTable
    """The host tier's slots; those after the leased ones are being filled."""
    start: int
    """Tokens before those that are fetched."""
    is_done: bool = False
    has_failed: bool = False
    """Whether some of the pages could not be read, or they are invalidated."""
    n_tokens: int = 0
    """Tokens that were fetched, once it is done."""
    is_invalidated: bool = False
    """Whether its pages must not enter the host tier: they were removed from the store meanwhile."""


@dataclass(slots=True, eq=False)
class Lookup:
    """A question to a store that servers share: which pages of a sequence it has."""

    key: bytes
    """Of the sequence's last page, by which another prompt with the same pages finds the lookup."""
    is_done: bool = False


@dataclass(slots=True, eq=False)
class _Write:
    offer: _Offer
    """What it writes, with the pages that the store has already."""
    source: BlockTable
    """Lease on the host tier's slots."""
    n_pages: int


@dataclass(slots=True)
class DiskCounters:
    """What the disk tier has done since the start."""

    n_pages_fetched: int = 0
    fetch_seconds: float = 0.0
    write_seconds: float = 0.0
    n_lookups: int = 0
    look_up_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class DiskTier:
    """Writes the pages that enter the host tier to a page store, and fetches them into free slots.

    What other servers have written to a store that they share is looked up, once for each prompt.

    The store knows pages by keys, which chain over everything that a page's KV depends on. So what it holds after a
    restart matches only the same model on the same kind of device.

    Args:
        host: the cache of the host slots.
        store: keeps the pages.
        root: the key of this engine, from ``page_keys.root_key``.
        slot_buffer: returns the memory of a host slot.
        cost: takes the measured time of fetches.
    """

    host: PageCache
    store: PageStore
    root: bytes
    slot_buffer: Callable[[int], memoryview]
    cost: LoadCost
    counters: DiskCounters = field(default_factory=DiskCounters)
    _offers: deque[_Offer] = field(default_factory=deque)
    _lookups: dict[int, Lookup] = field(default_factory=dict)
    _fetches: dict[int, Fetch] = field(default_factory=dict)
    _writes: dict[int, _Write] = field(default_factory=dict)
    _n_pages_in_write: int = 0
    _spared: dict[WaitingPrompt, tuple[list[bytes], int]] = field(default_factory=dict)
    """The keys of each waiting prompt, and how many of the first ones the store had when it was last asked."""
    changes: DiskChanges = field(init=False)
    """Records which pages enter and leave the store, once it is told to."""
    _chain: KeyChain = field(init=False)

    def __post_init__(self) -> None:
        self._chain = KeyChain(self.root, self.host.page_size * TOKEN_BYTES)
        self.changes = DiskChanges(self.store, self._chain, self.host.page_size * TOKEN_BYTES)

    @property
    def is_busy(self) -> bool:
        """Whether a lookup, a fetch or a write is in flight."""
        return bool(self._lookups or self._fetches or self._writes)

    @property
    def is_fetching(self) -> bool:
        """Whether a lookup or a fetch is in flight."""
        return bool(self._lookups or self._fetches)

    @property
    def n_offers(self) -> int:
        """Offers that wait to be written."""
        return len(self._offers)

    def block_tables(self) -> Iterator[BlockTable]:
        """Yields the host tier's block tables of fetches and writes in flight."""
        for fetch in self._fetches.values():
            yield fetch.blocks
        for write in self._writes.values():
            yield write.source

    def offer(self, namespace: Namespace, tokens: bytes) -> None:
        """Queues a sequence of the host tier, so that its pages are written. O(1) beside the tokens' copy."""
        if len(self._offers) == _MAX_OFFERS:
            self._offers.popleft()
        self._offers.append(_Offer(namespace, tokens))

    def n_fetchable(self, namespace: Namespace, tokens: bytes, n_host: int) -> int:
        """Returns the length of the prompt's prefix in host tier and store together, in tokens. O(tokens).

        Args:
            namespace: the prompt's.
            tokens: the prompt.
            n_host: length of its prefix in the host tier, in tokens of whole pages.
        """
        if not self.store.n_pages:
            return n_host
        first = n_host // self.host.page_size
        return n_host + self.store.run(self._chain.keys(namespace, tokens)[first:]) * self.host.page_size

    def look_up(self, namespace: Namespace, tokens: bytes, n_host: int) -> Lookup | None:
        """Asks a store that servers share for a prompt's pages that it is not known to have. O(tokens).

        Args:
            namespace: the prompt's.
            tokens: the prompt.
            n_host: length of its prefix in the host tier, in tokens of whole pages.

        Returns:
            The lookup, which may be that of another prompt with the same pages. None if there is nothing to ask.
        """
        keys = self._chain.keys(namespace, tokens)
        first = n_host // self.host.page_size
        first += self.store.run(keys[first:])
        if first >= len(keys):
            return None
        for lookup in self._lookups.values():
            if lookup.key == keys[-1]:
                return lookup
        ticket = self.store.look_up(keys[first:])
        if ticket is None:
            return None
        self._lookups[ticket] = lookup = Lookup(keys[-1])
        return lookup

    def find_fetch(self, namespace: Namespace, tokens: bytes, n_host: int) -> Fetch | None:
        """Returns a fetch in flight of the page after the prompt's first ``n_host`` tokens, if there is one."""
        n_bytes = (n_host + self.host.page_size) * TOKEN_BYTES
        for fetch in self._fetches.values():
            is_same = fetch.namespace == namespace and fetch.blocks.can_commit and not fetch.is_invalidated
            if is_same and n_bytes <= len(fetch.tokens) and tokens[:n_bytes] == fetch.tokens[:n_bytes]:
                return fetch
        return None

    def begin_fetch(self, namespace: Namespace, tokens: bytes, n_tokens: int, n_device: int) -> Fetch | None:
        """Starts to read the pages of a prompt's first ``n_tokens`` that the host tier does not have. O(tokens).

        If too few slots are available, only the leading pages are read that have one.

        Args:
            namespace: the prompt's.
            tokens: the prompt.
            n_tokens: length of its prefix in host tier and store together.
            n_device: length of its prefix on the device.

        Returns:
            None if there is no slot for a page that the device lacks; the cached prefix counts as used.
        """
        page_size = self.host.page_size
        blocks = self.host.open(
            namespace, tokens[: n_tokens * TOKEN_BYTES], is_hit=False
        )  # the load after it is one
        first = blocks.n_leased
        last = min(n_tokens // page_size, first + max(0, self.host.n_available_to(namespace)))
        if last <= max(first, n_device // page_size) or not self.host.reserve(blocks, last):
            self.host.close(blocks)
            return None
        n_tokens = last * page_size
        keys = self._chain.keys(namespace, tokens[: n_tokens * TOKEN_BYTES])[first:]
        missing = tokens[first * page_size * TOKEN_BYTES : n_tokens * TOKEN_BYTES]
        ticket = self.store.load(keys, missing, self._buffers(blocks.pages[first:last]))
        fetch = Fetch(namespace, bytearray(tokens[: n_tokens * TOKEN_BYTES]), blocks, first * page_size)
        self._fetches[ticket] = fetch
        return fetch

    def advance(self) -> bool:
        """Takes the transfers that have finished, then starts writes of offered sequences.

        O(1) if nothing was offered and nothing has finished, else O(tokens of a bounded number of offers).

        Returns:
            Whether a lookup or a fetch has finished.
        """
        has_fetched = False
        for finished in self.store.take_finished():
            if (fetch := self._fetches.pop(finished.ticket, None)) is not None:
                self._end_fetch(fetch, finished)
                has_fetched = True
            elif (lookup := self._lookups.pop(finished.ticket, None)) is not None:
                lookup.is_done = has_fetched = True
                self.counters.n_lookups += 1
                self.counters.look_up_seconds += finished.seconds
                self.cost.add_look_up(finished.seconds)
            elif (write := self._writes.pop(finished.ticket, None)) is not None:
                self._end_write(write, finished)
        if self._offers:
            self._start_writes()
        return has_fetched

    def invalidate(self, namespace: Namespace, tokens: bytes) -> int:
        """Removes every sequence that begins with ``tokens`` from the store, and those that are on their way.

        The prefix's own pages go as those of ``RadixTree.detach`` do. Call it once the host tier's are detached: a
        write of which the host tier still has the pages begins again, because the store drops all writes.
        O(pages in the store).

        Args:
            namespace: namespace of the sequences.
            tokens: whole pages; none for the whole namespace.

        Returns:
            The number of pages removed.
        """
        for fetch in self._fetches.values():
            is_longer, is_shorter = fetch.tokens.startswith(tokens), tokens.startswith(fetch.tokens)
            fetch.is_invalidated |= fetch.namespace == namespace and (is_longer or is_shorter)
        *leading, key = namespace_key(self.root, namespace), *self._chain.keys(namespace, tokens)
        removal = self.store.remove(key, leading[1:])
        for write in self._writes.values():
            if write.source.can_commit:
                self.offer(*write.offer)
        return removal.n_pages

    def flush(self) -> None:
        """Removes all pages from the store, also those of other models, unless servers share it. O(its pages)."""
        self._offers.clear()
        self.store.clear()

    def close(self, timeout_s: float) -> None:
        """Finishes the writes that were offered as far as ``timeout_s`` allows, and drops the rest."""
        self.store.close(timeout_s)

    def _end_fetch(self, fetch: Fetch, finished: FinishedTransfer) -> None:
        page_size, first = self.host.page_size, fetch.blocks.n_leased
        n_missing = len(fetch.blocks.pages) - first
        self.counters.n_pages_fetched += finished.n_pages
        self.counters.fetch_seconds += finished.seconds
        if finished.n_pages:
            self.cost.add_fetch(finished.n_pages * page_size, finished.seconds)
        n_pages = 0 if fetch.is_invalidated else finished.n_pages
        fetch.n_tokens = n_pages * page_size
        fetch.is_done, fetch.has_failed = True, n_pages < n_missing
        self.changes.add_stored(fetch.namespace, bytes(fetch.tokens))
        self.host.commit_copied(fetch.blocks, fetch.tokens, (first + n_pages) * page_size)
        self.host.close(fetch.blocks)

    def _end_write(self, write: _Write, finished: FinishedTransfer) -> None:
        self.counters.write_seconds += finished.seconds
        self._n_pages_in_write -= write.n_pages
        self.changes.add_stored(*write.offer)
        self.host.close(write.source)

    def _start_writes(self) -> None:
        self._spare()
        max_pages = max(1, min(_MAX_WRITTEN_BYTES // self.store.page_bytes, self.host.n_pages // 4))
        for _ in range(min(_MAX_OFFERS_PER_TURN, len(self._offers))):
            if self._n_pages_in_write >= max_pages:
                break
            self._start_write(self._offers.popleft())

    def _spare(self) -> None:
        """Tells the store what waiting prompts will fetch, before it makes room for writes.

        O(waiting prompts + pages that the store got or lost), and O(tokens) for a bounded number of new prompts.
        """
        before, self._spared = self._spared, {}
        n_new = 0
        for prompt in self.host.waiting():
            if prompt in before:
                keys, n_stored = before[prompt]
            elif n_new < _MAX_OFFERS_PER_TURN:
                n_new += 1
                keys, n_stored = self._chain.keys(*prompt), 0
            else:
                continue
            if n_stored and not self.store.run(keys[n_stored - 1 : n_stored]):
                n_stored = 0
            if self.store.run(keys[n_stored : n_stored + 1]):
                n_stored += self.store.run(keys[n_stored:])
            self._spared[prompt] = keys, n_stored
        self.store.spare([keys[n_stored - 1] for keys, n_stored in self._spared.values() if n_stored])

    def _start_write(self, offer: _Offer) -> None:
        """Starts to write what the store does not have of an offer and the host tier still has."""
        page_size = self.host.page_size
        source = self.host.open(offer.namespace, offer.tokens, is_use=False)
        last = source.n_leased
        tokens = offer.tokens[: last * page_size * TOKEN_BYTES]
        keys = self._chain.keys(offer.namespace, tokens)
        first = self.store.run(keys)
        if first >= last:
            self.host.close(source)
            return
        missing = tokens[first * page_size * TOKEN_BYTES :]
        ticket = self.store.store(keys[first:], missing, self._buffers(source.pages[first:last]))
        self._writes[ticket] = _Write(offer, source, last - first)
        self._n_pages_in_write += last - first

    def _buffers(self, slots: Sequence[int]) -> list[memoryview]:
        return [self.slot_buffer(slot) for slot in slots]
