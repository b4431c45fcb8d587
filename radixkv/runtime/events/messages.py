"""The messages of cache events, as vLLM's subscribers decode them.

A batch is a msgpack array, and an event in it a map that its ``type`` names. Optional fields of vLLM's that do not
apply are left out. See docs/events.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

Medium = Literal["GPU", "CPU", "STORAGE"]
"""The tier: the device (also if that is a CPU), the host tier, the disk tier."""


GROUP_OF_STATES = 1
"""``group_idx`` of events of states. Those of pages have none, which is the group of full attention."""
StateKind = Literal["mamba", "sliding_window"]
"""vLLM's word for what a state is: of recurrent layers, or the KV of a window."""


class BlockStored(msgspec.Struct, frozen=True, tag=True, gc=False, omit_defaults=True):
    """A tier has consecutive pages now, or a state at the end of one page."""

    block_hashes: list[int]
    """Unsigned 64-bit hash of each page."""
    parent_block_hash: int | None
    """Hash of the page before them; None if they begin their sequences."""
    token_ids: list[int]
    """Tokens of all the pages; none if they are withheld."""
    block_size: int
    """Tokens per page."""
    medium: Medium
    lora_id: None
    """Always there: vLLM's subscribers require it, as ``lora_name``."""
    lora_name: str | None
    """Name of the adapter with which they were computed; None: without one."""
    group_idx: int | None = None
    """``GROUP_OF_STATES`` for a state; None for pages."""
    kv_cache_spec_kind: StateKind | None = None
    """What the state is; None for pages."""
    kv_cache_spec_sliding_window: int | None = None
    """Positions of the window; None unless the state is one's KV."""


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, gc=False, omit_defaults=True):
    """A tier has lost pages, or states at the ends of pages."""

    block_hashes: list[int]
    medium: Medium
    group_idx: int | None = None
    """``GROUP_OF_STATES`` for states; None for pages."""


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True, gc=False):
    """No tier has a page any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The events of one turn of the loop, in order."""

    ts: float
    """Seconds since 1970."""
    events: Sequence[Event]
    data_parallel_rank: int = 0


_encoder = msgspec.msgpack.Encoder()


def encode_batch(batch: EventBatch) -> bytes:
    """Encodes a batch. O(size)."""
    return _encoder.encode(batch)
