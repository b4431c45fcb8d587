"""The changes of all tiers as events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.events.messages import AllBlocksCleared, BlockRemoved, BlockStored, Event, Medium
from radixkv.runtime.protocols.tiers import TierChanges
from radixkv.tree.changes import StoredPages
from radixkv.wire.messages import unpack_tokens


class EventLog:
    """Tells which computed pages the tiers have got and lost. Only whole pages; a tier's events are in order.

    Args:
        device: the device's page cache; empty.
        tiers: the changes of the other tiers, which are empty as well.
        shows_salted_tokens: whether events of prompts with a ``cache_salt``, or of a tenant's own, have their
            tokens.
        adapter_names: names of adapters by their digests.
    """

    def __init__(
        self,
        device: PageCache,
        tiers: Sequence[TierChanges],
        *,
        shows_salted_tokens: bool,
        adapter_names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._adapter_names = adapter_names
        self._page_size = device.page_size
        self._shows_salted_tokens = shows_salted_tokens
        self._tiers = [TierChanges("GPU", device.tree.record_changes(), device.tree.computed_pages), *tiers]

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
        is_shown = self._shows_salted_tokens or not pages.namespace.is_private
        tokens = unpack_tokens(pages.tokens) if is_shown else []
        name = self._adapter_names.get(pages.namespace.adapter)
        return BlockStored(
            list(pages.digests), pages.parent_digest, tokens, self._page_size, medium, lora_name=name
        )
