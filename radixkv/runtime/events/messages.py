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


class BlockStored(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A tier has consecutive pages now."""

    block_hashes: list[int]
    """Unsigned 64-bit hash of each page."""
    parent_block_hash: int | None
    """Hash of the page before them; None if they begin their sequences."""
    token_ids: list[int]
    """Tokens of all the pages; none if they are withheld."""
    block_size: int
    """Tokens per page."""
    medium: Medium
    lora_id: None = None
    """Always there: vLLM's subscribers require it, as ``lora_name``."""
    lora_name: str | None = None
    """Name of the adapter with which they were computed; None: without one."""


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A tier has lost pages."""

    block_hashes: list[int]
    medium: Medium


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
