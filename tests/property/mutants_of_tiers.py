"""Mutants of the tiers: each breaks one rule of the copies between device, host and disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.tiers.host_tier import HostLoad, HostTier
from radixkv.runtime.tiers.memory_tiers import MemoryTiers
from radixkv.runtime.tiers.storage_tier import Fetch, StorageTier
from radixkv.runtime.tiers.stores.page_keys import KeyChain
from radixkv.runtime.tiers.stores.page_store import FinishedTransfer
from radixkv.runtime.tiers.tier_link import Store
from radixkv.tree.node import TOKEN_BYTES, Lease, Namespace
from radixkv.tree.radix_tree import RadixTree

Patch = pytest.MonkeyPatch


def store_what_is_not_computed(patch: Patch) -> None:
    patch.setattr(RadixTree, "n_computed", lambda self, lease: lease.n_tokens)


def free_the_pages_of_a_load_in_flight(patch: Patch) -> None:
    leave = HostTier.leave

    def mutant(self: HostTier, load: HostLoad) -> None:
        leave(self, load)
        if not load.is_done:
            self.device.close(load.blocks)
            load.blocks = self.device.open(Namespace(), b"", bypasses_tree=True)

    patch.setattr(HostTier, "leave", mutant)


def store_pages_without_a_pin(patch: Patch) -> None:
    open_blocks, n_computed = PageCache.open, RadixTree.n_computed
    emptied: dict[int, tuple[Lease, int]] = {}
    """By a lease's id: the lease, and the computed tokens of the one in whose place it is."""

    def mutant(self: PageCache, *args: Any, is_use: bool = True, **settings: Any) -> BlockTable:
        blocks = open_blocks(self, *args, is_use=is_use, **settings)
        if not is_use and blocks.lease is not None:
            n_tokens = n_computed(self.tree, blocks.lease)
            self._free += self.tree.release(blocks.lease)
            blocks.lease = self.tree.lease(blocks.lease.namespace, b"", is_use=False)
            emptied[id(blocks.lease)] = blocks.lease, n_tokens
        return blocks

    def n_computed_before(self: RadixTree, lease: Lease) -> int:
        return emptied[id(lease)][1] if id(lease) in emptied else n_computed(self, lease)

    patch.setattr(PageCache, "open", mutant)
    patch.setattr(RadixTree, "n_computed", n_computed_before)
    patch.setattr(PageCache, "check", lambda self, block_tables: None)


def commit_before_the_copy_is_done(patch: Patch) -> None:
    begin_load = HostTier.begin_load

    def mutant(self: HostTier, *args: Any, **options: Any) -> HostLoad | None:
        load = begin_load(self, *args, **options)
        if load is not None:
            self.device.commit_copied(load.blocks, load.tokens, len(load.tokens) // TOKEN_BYTES)
        return load

    patch.setattr(HostTier, "begin_load", mutant)


def forget_those_who_joined(patch: Patch) -> None:
    advance = MemoryTiers.advance

    def mutant(self: MemoryTiers) -> bool:
        for request in list(self._joined):
            del self._joined[request]
        return advance(self)

    patch.setattr(MemoryTiers, "advance", mutant)


def promise_pages_for_ever(patch: Patch) -> None:
    leave = MemoryTiers.leave

    def mutant(self: MemoryTiers, request: object) -> None:
        before = self.n_promised
        leave(self, request)  # type: ignore[arg-type]
        self.n_promised = before

    patch.setattr(MemoryTiers, "leave", mutant)


def lose_the_last_page_of_a_copy(patch: Patch) -> None:
    commit_copied = PageCache.commit_copied

    def mutant(self: PageCache, blocks: BlockTable, tokens: bytearray, n_tokens: int) -> None:
        commit_copied(self, blocks, tokens, max(0, n_tokens - self.page_size))
        blocks.pages = blocks.pages[: blocks.n_leased]

    patch.setattr(PageCache, "commit_copied", mutant)


def keep_a_store_of_what_was_invalidated(patch: Patch) -> None:
    end_store = HostTier._end_store

    def mutant(self: HostTier, store: Store[BlockTable], finished: FinishedTransfer) -> None:
        source, store.blocks = store.blocks, self.device.open(store.offer.namespace, b"", is_use=False)
        end_store(self, store, finished)
        self.device.close(source)

    patch.setattr(HostTier, "_end_store", mutant)


def keep_a_load_of_what_was_invalidated(patch: Patch) -> None:
    end_load = HostTier._end_load

    def mutant(self: HostTier, load: HostLoad, finished: FinishedTransfer) -> None:
        source, load.lower = load.lower, self.host.open(load.namespace, b"", is_use=False)
        end_load(self, load, finished)
        self.host.close(source)

    patch.setattr(HostTier, "_end_load", mutant)


def keep_a_fetch_of_what_was_invalidated(patch: Patch) -> None:
    end_load = StorageTier._end_load

    def mutant(self: StorageTier, load: Fetch, finished: FinishedTransfer) -> None:
        load.lower.can_commit = True
        end_load(self, load, finished)

    patch.setattr(StorageTier, "_end_load", mutant)


def write_slots_without_a_lease(patch: Patch) -> None:
    advance = StorageTier.advance

    def mutant(self: StorageTier) -> bool:
        has_fetched = advance(self)
        for write in self._stores.values():
            self.host.close(write.blocks)
            write.blocks = self.host.open(Namespace(), b"", bypasses_tree=True)
        return has_fetched

    patch.setattr(StorageTier, "advance", mutant)


def believe_in_a_lost_page(patch: Patch) -> None:
    end_load = StorageTier._end_load

    def mutant(self: StorageTier, load: Fetch, finished: FinishedTransfer) -> None:
        end_load(self, load, finished._replace(n_pages=load.n_pages))

    patch.setattr(StorageTier, "_end_load", mutant)


def forget_the_end_of_a_lookup(patch: Patch) -> None:
    advance = StorageTier.advance

    def mutant(self: StorageTier) -> bool:
        lookups = list(self._lookups.values())
        has_fetched = advance(self)
        for lookup in lookups:
            lookup.is_done = False
        return has_fetched

    patch.setattr(StorageTier, "advance", mutant)


def leave_the_namespace_out_of_keys(patch: Patch) -> None:
    keys = KeyChain.keys
    patch.setattr(KeyChain, "keys", lambda self, namespace, tokens: keys(self, Namespace(), tokens))


OF_TIERS: tuple[Callable[[Patch], None], ...] = (
    store_what_is_not_computed,
    free_the_pages_of_a_load_in_flight,
    store_pages_without_a_pin,
    commit_before_the_copy_is_done,
    forget_those_who_joined,
    promise_pages_for_ever,
    lose_the_last_page_of_a_copy,
    keep_a_store_of_what_was_invalidated,
    keep_a_load_of_what_was_invalidated,
)
OF_DISK: tuple[Callable[[Patch], None], ...] = (
    write_slots_without_a_lease,
    believe_in_a_lost_page,
    forget_the_end_of_a_lookup,
    leave_the_namespace_out_of_keys,
    keep_a_fetch_of_what_was_invalidated,
)
