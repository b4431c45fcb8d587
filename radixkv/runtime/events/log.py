"""The changes of all tiers as events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.events.messages import AllBlocksCleared, BlockRemoved, BlockStored, Event, Medium
from radixkv.runtime.tiers.transfers import Transfers
from radixkv.tree.changes import Change, StoredPages
from radixkv.wire.messages import unpack_tokens


class ChangeSource(Protocol):
    """Where the changes of one tier come from."""

    @property
    def n_pages(self) -> int:
        """Pages that were stored and not removed since."""
        ...

    def take(self) -> list[Change]:
        """Returns the changes since the last call."""
        ...


class _Tier(NamedTuple):
    medium: Medium
    changes: ChangeSource
    stored_pages: Callable[[], Iterable[StoredPages]]
    """Yields all pages, each after the pages before it."""


class EventLog:
    """Tells which computed pages the tiers have got and lost. Only whole pages; a tier's events are in order.

    Args:
        device: the device's page cache; empty.
        transfers: copy pages to and from the other tiers, which are empty as well; None without one.
        shows_salted_tokens: whether events of prompts with a ``cache_salt``, or of a tenant's own, have their
            tokens.
    """

    def __init__(self, device: PageCache, transfers: Transfers | None, *, shows_salted_tokens: bool) -> None:
        self._page_size = device.page_size
        self._shows_salted_tokens = shows_salted_tokens
        self._tiers = [_tier_of("GPU", device)]
        if transfers is not None:
            self._tiers.append(_tier_of("CPU", transfers.host))
            if transfers.disk is not None:
                changes = transfers.disk.changes
                changes.is_on = True
                self._tiers.append(_Tier("STORAGE", changes, changes.stored_pages))

    def take(self) -> list[Event]:
        """Returns the events since the last call. O(1) if nothing has changed, else O(pages that have changed)."""
        events: list[Event] = []
        for medium, changes, _ in self._tiers:
            removed: list[int] | None = None  # the hashes of the last event, if the tier has lost pages in it
            for change in changes.take():
                if isinstance(change, StoredPages):
                    events.append(self._stored(medium, change))
                    removed = None
                elif removed is None:
                    removed = list(change.digests)
                    events.append(BlockRemoved(removed, medium))
                else:
                    removed.extend(change.digests)
        if events and not any(changes.n_pages for _, changes, _ in self._tiers):
            return [AllBlocksCleared()]
        return events

    def snapshot(self) -> Iterator[BlockStored]:
        """Yields an event for each run of pages that the tiers have now. O(pages); change nothing meanwhile."""
        for medium, _, stored_pages in self._tiers:
            for pages in stored_pages():
                yield self._stored(medium, pages)

    def _stored(self, medium: Medium, pages: StoredPages) -> BlockStored:
        is_shown = self._shows_salted_tokens or not (pages.namespace.salt or pages.namespace.tenant)
        tokens = unpack_tokens(pages.tokens) if is_shown else []
        return BlockStored(list(pages.digests), pages.parent_digest, tokens, self._page_size, medium)


def _tier_of(medium: Medium, cache: PageCache) -> _Tier:
    assert not cache.tree.n_pages_reachable, "pages that are there already are not recorded"
    cache.tree.changes.is_on = True
    return _Tier(medium, cache.tree.changes, cache.tree.computed_pages)
