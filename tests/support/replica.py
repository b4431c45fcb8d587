"""What a subscriber of cache events knows, from batches as vLLM's subscribers decode them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from radixkv.runtime.tiers.stores.page_keys import DIGEST_BYTES, namespace_key
from radixkv.tree.digest import chained_xxh3_64, namespace_digest
from radixkv.tree.node import Namespace
from support.engine import ROOT_KEY, Engine
from support.fake_device import unpack


class BlockStored(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """vLLM's fields: those without a default are required."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(Batch).decode

Block = tuple[int | None, tuple[int, ...]]
"""Hash of the block before, and the tokens."""


@dataclass
class Replica:
    """The blocks of each medium, by hash, and those with a state at their ends.

    It refuses events that do not fit what it knows."""

    blocks: dict[str, dict[int, Block]] = field(default_factory=lambda: {"GPU": {}, "CPU": {}, "STORAGE": {}})
    states: dict[str, set[int]] = field(default_factory=lambda: {"GPU": set(), "CPU": set(), "STORAGE": set()})

    def apply(self, batch: bytes) -> None:
        for event in decode(batch).events:
            match event:
                case AllBlocksCleared():
                    for blocks in (*self.blocks.values(), *self.states.values()):
                        blocks.clear()
                case BlockRemoved(block_hashes=hashes, medium=str(medium), group_idx=1):
                    for block_hash in hashes:
                        self.states[medium].remove(block_hash)
                case BlockStored(medium=str(medium), group_idx=1):
                    self._keep(medium, event)
                case BlockRemoved(block_hashes=hashes, medium=str(medium)):
                    for block_hash in hashes:
                        del self.blocks[medium][block_hash]
                case BlockStored(medium=str(medium)):
                    self._store(self.blocks[medium], event)
                case _:
                    raise AssertionError(f"an event without a medium: {event}")

    def n_usable(self, medium: str, hashes: list[int]) -> int:
        """Returns how many pages of a prompt a request can go on from, where the model needs a state for that.

        Args:
            medium: where they are.
            hashes: of the prompt's whole pages, without its last token, which is always computed.
        """
        n_usable = 0
        for n_pages, block_hash in enumerate(hashes, 1):
            if block_hash not in self.blocks[medium]:
                break
            if block_hash in self.states[medium]:
                n_usable = n_pages
        return n_usable

    def _keep(self, medium: str, event: BlockStored) -> None:
        (block_hash,) = event.block_hashes
        assert event.kv_cache_spec_kind in ("mamba", "sliding_window")
        assert (event.kv_cache_spec_sliding_window is None) == (event.kv_cache_spec_kind == "mamba")
        assert self.blocks[medium][block_hash] == (event.parent_block_hash, tuple(event.token_ids))
        assert block_hash not in self.states[medium], "kept twice"
        self.states[medium].add(block_hash)

    def _store(self, blocks: dict[int, Block], event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        is_shown = len(event.token_ids) == size * len(event.block_hashes)
        assert is_shown or not event.token_ids
        # Pages that a file store has had before the start are unknown, and so are those that it has lost.
        assert parent is None or parent in blocks or event.medium == "STORAGE", "stored before its parent"
        for index, block_hash in enumerate(event.block_hashes):
            assert block_hash not in blocks, "stored twice"
            blocks[block_hash] = parent, tuple(event.token_ids[index * size : (index + 1) * size])
            parent = block_hash


def blocks_of(engine: Engine) -> dict[str, dict[int, Block]]:
    """Returns the computed pages that the tiers of an engine have."""
    blocks: dict[str, dict[int, Block]] = {"GPU": {}, "CPU": {}, "STORAGE": _blocks_on_disk(engine)}
    for medium, cache in (("GPU", engine.cache), ("CPU", engine.host)):
        for run in cache.tree.computed_pages():
            parent, size = run.parent_digest, 4 * engine.page_size
            for index, digest in enumerate(run.digests):
                page = run.tokens[index * size : (index + 1) * size]
                blocks[medium][digest] = parent, tuple(unpack(cache.tree.marks.tokens(page)))
                parent = digest
    return blocks


def _blocks_on_disk(engine: Engine) -> dict[int, Block]:
    """Returns the pages of the fake store, whose keys tell only the page before."""
    digests: dict[bytes, tuple[int, bool]] = {}
    for namespace in (Namespace(), Namespace(salt="a"), Namespace(adapter="a")):
        digest = namespace_digest(namespace)
        digests[namespace_key(ROOT_KEY, namespace)[:DIGEST_BYTES]] = digest, True
    written = engine.store.all_written
    found: dict[int, Block] = {}
    for key, tokens in written.items():  # in the order in which they were written, so parents come first
        (parent, is_root), digest = digests[key[DIGEST_BYTES:]], 0
        digest = chained_xxh3_64(parent, tokens)
        digests[key[:DIGEST_BYTES]] = digest, False
        if key in engine.store.pages:
            found[digest] = None if is_root else parent, tuple(unpack(engine.cache.tree.marks.tokens(tokens)))
    return found
