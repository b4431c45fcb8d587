"""The states of sequences behind the host tier: their keys, which of them the stores have, and their memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.tiers.copied_states import CopiedStates, ReservedState
from radixkv.runtime.tiers.stores.joined_store import JoinedStore
from radixkv.runtime.tiers.stores.page_keys import StateKeys
from radixkv.runtime.tiers.stores.page_store import PageStore
from radixkv.tree.node import TOKEN_BYTES


class StoredStates:
    """The states of a host tier as its stores keep them: pages that continue a prefix, see ``StateKeys``.

    Args:
        host: has states.
        copied: these.
        store: all stores.
        part_buffers: returns the memory of a part of a recurrent state in the host tier, in parts of a page's size;
            None if the states are window tails.
        slot_buffer: returns the memory of a host slot.
    """

    def __init__(
        self,
        host: PageCache,
        copied: CopiedStates,
        store: JoinedStore,
        part_buffers: Callable[[int], list[memoryview]] | None,
        slot_buffer: Callable[[int], memoryview],
    ) -> None:
        assert host.tree.states is not None
        self._host, self._copied, self._store = host, copied, store
        self._part_buffers, self._slot_buffer = part_buffers, slot_buffer
        interval = host.tree.states.block_tokens // host.page_size
        page_token_bytes = host.page_size * TOKEN_BYTES
        self.keys = StateKeys(copied.pages_per_part, interval, page_token_bytes, copied.max_parts)
        """Makes the keys of the states' pages."""
        self.n_pages = copied.max_parts * copied.pages_per_part
        """Most pages that are read with a state."""

    def deepest(self, keys: Sequence[bytes], last: int, first: int, store: PageStore | None = None) -> int:
        """Returns after how many pages the deepest state is that is whole in the stores; ``first`` without one.

        O(pages), and a question to the stores for each part up to it.

        Args:
            keys: of a sequence's pages.
            last: the state is after so many pages at most.
            first: and after more than so many.
            store: the only store that counts; None: each part is in one of them or another.
        """
        return self.keys.deepest(keys, last, first, partial(self._has_part, store or self._store))

    def n_usable(self, n_tokens: int) -> int:
        """Returns after how many pages of a prompt a state may be at most: a token is computed on it. O(1)."""
        return next(iter(self.keys.ends((n_tokens - 1) // self._host.page_size)), 0)

    def are_everywhere(self, key: bytes) -> bool:
        """Returns whether each store has the part of a state after the page with a key. O(its pages)."""
        return self._store.run_of_all(self.keys.all(key)) == self.keys.n_pages

    def remove(self, key: bytes) -> int:
        """Removes the part of a state after the page with a key; returns the number of its pages."""
        first = self.keys.first(key)
        return self._store.remove(first).n_pages if self._store.has(first) else 0

    def reserve(
        self, blocks: BlockTable, keys: Sequence[bytes], n_least: int, n_available: int, *, is_ahead: bool
    ) -> tuple[int, ReservedState | None]:
        """Makes room in the host tier for the deepest state of a prompt that fits there with the pages before it.

        O(pages), and a question to the stores for each part of states.

        Args:
            blocks: leases the pages that the host tier has.
            keys: of the prompt's pages, up to the end of what can be had.
            n_least: pages after which the state must be.
            n_available: pages that the host tier has room for.
            is_ahead: whether room is made only where no upcoming prompt needs it.

        Returns:
            After how many pages the state is, and its room; 0 and None if none fits.
        """
        assert blocks.lease is not None
        reserve = self._copied.reserve_unneeded if is_ahead else self._copied.reserve
        last = len(keys)
        while last > n_least:
            if self._copied.n_pages_with(max(0, last - blocks.n_leased)) <= n_available:
                state = reserve(blocks.lease, last * self._host.page_size)
                if state is not None:
                    return last, state
            last = self.deepest(keys, last - 1, n_least)
        return 0, None

    def pages(self, keys: Sequence[bytes], parts: Mapping[int, int]) -> tuple[list[bytes], bytes, list[memoryview]]:
        """Returns keys, tokens and memory of the pages of a state's parts. O(pages).

        Args:
            keys: of the sequence's pages.
            parts: where the host tier has them, as in ``HeldState``.
        """
        of_parts = [key for entry in parts for key in self.keys.all(keys[entry])]
        return (
            of_parts,
            self.keys.tokens * len(parts),
            [one for part in parts.values() for one in self._memory(part)],
        )

    def _memory(self, part: int) -> list[memoryview]:
        if self._part_buffers is not None:
            return self._part_buffers(part)
        return [self._slot_buffer(slot) for slot in self._host.window_pages.pages_of(part)]

    def _has_part(self, store: PageStore | JoinedStore, key: bytes) -> bool:
        """Returns whether stores have the part of a state after the page with a key. O(its pages)."""
        return store.has(self.keys.first(key)) and store.run(self.keys.all(key)) == self.keys.n_pages
