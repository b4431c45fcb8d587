"""The changes of all tiers as events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.events.messages import (
    GROUP_OF_STATES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Medium,
    StateKind,
)
from radixkv.runtime.protocols.tiers import TierChanges
from radixkv.tree.changes import KeptState, LostState, StoredPages
from radixkv.wire.messages import unpack_tokens


class EventLog:
    """Tells which computed pages and states the tiers have got and lost. Only whole pages; a tier's events are in
    order.

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
        self._marks = device.tree.marks
        self._page_size = device.page_size
        self._shows_salted_tokens = shows_salted_tokens
        changes = device.tree.record_changes()
        of_device = TierChanges("GPU", changes, device.tree.computed_pages, changes.kept_states)
        self._tiers = [of_device, *tiers]
        self._window = device.window_pages.window
        self._state_kind: StateKind = "mamba" if self._window is None else "sliding_window"
        self._activated: dict[Medium, dict[int, str]] = {one.medium: {} for one in self._tiers}
        """By tier: of the pages that activated LoRAs have computed, the digest of the adapter by their hash."""

    def take(self) -> list[Event]:
        """Returns the events since the last call. O(1) if nothing has changed, else O(pages that have changed)."""
        events: list[Event] = []
        for medium, changes, *_ in self._tiers:
            last: BlockRemoved | None = None  # the last event, if the tier has lost something in it
            for change in changes.take():
                if isinstance(change, StoredPages):
                    events += self._stored(medium, change)
                    last = None
                    continue
                if isinstance(change, KeptState):
                    events.append(self._kept(medium, change))
                    last = None
                    continue
                digests: Sequence[int]
                if isinstance(change, LostState):
                    digests, group = (change.digest,), GROUP_OF_STATES
                else:
                    digests, group = change.digests, None
                    if activated := self._activated[medium]:
                        for digest in digests:
                            activated.pop(digest, None)
                if last is None or last.group_idx != group:
                    last = BlockRemoved([], medium, group)
                    events.append(last)
                last.block_hashes.extend(digests)
        if events and not any(changes.n_pages for _, changes, *_ in self._tiers):
            return [AllBlocksCleared()]
        return events

    def snapshot(self) -> Iterator[BlockStored]:
        """Yields an event for each run of pages that the tiers have now, and for each state.

        O(pages); change nothing meanwhile.
        """
        for medium, _, stored_pages, kept_states in self._tiers:
            for pages in stored_pages():
                yield from self._stored(medium, pages)
            for state in kept_states():
                yield self._kept(medium, state)

    def _kept(self, medium: Medium, state: KeptState) -> BlockStored:
        """Returns the event of a state: that of its page in a group of its own, as of vLLM's layers."""
        (event,) = self._stored(medium, state.page)
        return msgspec.structs.replace(
            event,
            group_idx=GROUP_OF_STATES,
            kv_cache_spec_kind=self._state_kind,
            kv_cache_spec_sliding_window=self._window,
        )

    def _stored(self, medium: Medium, pages: StoredPages) -> list[BlockStored]:
        """Returns an event for each adapter of a run of pages, which are two where one is activated."""
        marks, n_pages, activated = self._marks.find(pages.tokens), len(pages.digests), self._activated[medium]
        adapter = pages.namespace.adapter
        if pages.parent_digest is not None:
            adapter = activated.get(pages.parent_digest, adapter)
        first = marks[0][0] // self._page_size if marks else n_pages
        events = [self._event(medium, pages, 0, first, adapter)] if first else []
        if marks:
            adapter = marks[0][1].adapter
            events.append(self._event(medium, pages, first, n_pages, adapter))
        if adapter != pages.namespace.adapter:
            activated |= dict.fromkeys(pages.digests[first % n_pages :], adapter)
        return events

    def _event(self, medium: Medium, pages: StoredPages, first: int, last: int, adapter: str) -> BlockStored:
        """Returns the event of some pages of a run."""
        tokens: list[int] = []
        if self._shows_salted_tokens or not pages.namespace.is_private:
            page_bytes = len(pages.tokens) // len(pages.digests)
            tokens = unpack_tokens(self._marks.tokens(pages.tokens[first * page_bytes : last * page_bytes]))
        return BlockStored(
            list(pages.digests[first:last]),
            pages.digests[first - 1] if first else pages.parent_digest,
            tokens,
            self._page_size,
            medium,
            lora_id=None,
            lora_name=self._adapter_names.get(adapter),
        )
