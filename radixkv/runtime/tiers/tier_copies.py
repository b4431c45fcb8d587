"""What copies between the tiers are made of: prefixes in each tier, offers of sequences, loads in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.tree.node import Namespace


class Offer(NamedTuple):
    """A sequence whose cached pages are worth a copy in the host tier."""

    namespace: Namespace
    tokens: bytes
    """Whole pages of tokens, little-endian int32."""
    on_stored: Callable[[Namespace, bytes], None] | None = None
    """Called with namespace and tokens once the host tier has what it has room for of the computed pages."""


class CachedPrefixes(NamedTuple):
    """Lengths of a prompt's cached prefixes in each tier, in tokens of whole pages."""

    n_device: int
    n_host: int
    n_disk: int = 0
    """In host tier and disk together; 0 if the disk was not looked at."""

    @property
    def n_beyond_device(self) -> int:
        """Tokens that the host tier has after those on the device."""
        return max(0, self.n_host - self.n_device)

    @property
    def n_beyond_host(self) -> int:
        """Tokens that the disk has after those on the device and in the host tier."""
        return max(0, self.n_disk - max(self.n_host, self.n_device))


@dataclass(slots=True, eq=False)
class Load:
    """A copy of a sequence's pages from the host tier to the device, for one request and those that join it."""

    tokens: bytearray
    """Tokens of the pages that the device will have, from the start of the sequence."""
    blocks: BlockTable
    """The request's block table. Its pages after the leased ones belong to the copy until it has finished."""
    source: BlockTable
    """Lease on the host tier's pages of the same tokens."""
    n_pages: int
    """Pages to copy."""
    is_done: bool = False
    """Whether the copy has finished; ``source`` is closed then."""
    has_failed: bool = False
    """Whether the copy has failed."""
    is_lost: bool = False
    """Whether the device has only the pages before it: the copy has failed, or its source was detached."""
    is_wanted: bool = True
    """Whether the request still waits for it. If not, ``blocks`` is closed when the copy has finished."""
