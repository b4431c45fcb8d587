"""The schemes of the study, by the names that the command prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from radixkv.lab.studies.paging.allocators import BestFitAllocator, BuddyAllocator
from radixkv.lab.studies.paging.contiguous import (
    ContiguousScheme,
    reserve_exact_length,
    reserve_factor,
    reserve_maximum,
    reserve_power_of_two,
    reserve_stored,
)
from radixkv.lab.studies.paging.paged import PagedScheme, Sharing

PAGED = "paged"
"""The engine without prefix caching, but with copy-on-write among the choices of a request."""
RADIX = "radix"
"""The engine as it is, to which the study's targets apply."""
RESERVE_MAXIMUM = "reserve-maximum"
"""The baseline, with which the largest batch and the throughput of ``RADIX`` are compared."""
RESERVE_POWER_OF_TWO = "reserve-power-of-two"
ORACLE = "oracle"

N_LAYERS, N_KV_HEADS, HEAD_DIM, VALUE_BYTES = 32, 8, 128, 2
"""The KV cache whose granules are simulated: Llama 3.1 8B's, in 16 bits."""
N_TENSORS = 2 * N_LAYERS
"""Tensors that are mapped granule by granule, where each layer's K and V are tensors of their own."""


class Granule(NamedTuple):
    """The unit in which physical memory is mapped."""

    n_bytes: int
    """Bytes, at least those of a token."""
    n_layers: int = 1
    """Layers whose K is in one tensor, and whose V is in another."""

    @property
    def n_tokens(self) -> int:
        """Tokens that a granule holds."""
        return granule_tokens(self.n_bytes, self.n_layers)

    @property
    def n_tensors(self) -> int:
        """Tensors of the cache, in each of which a sequence needs a granule for the same tokens."""
        return N_TENSORS // self.n_layers

    @property
    def name(self) -> str:
        """The name in tables and flags, with the layers of a tensor behind a slash if there are several."""
        size = f"{self.n_bytes >> 20} MiB" if self.n_bytes >= 1 << 20 else f"{self.n_bytes >> 10} KiB"
        return size if self.n_layers == 1 else f"{size}/{self.n_layers}"


class Pool(NamedTuple):
    """The memory and the lengths that a scheme has to know."""

    n_slots: int
    """Token slots of the pool."""
    max_model_len: int
    """Maximum tokens of a sequence."""
    mean_answer: float
    """Average tokens of an answer."""
    page_size: int
    """Tokens per page, for a scheme with pages."""
    granule: Granule | None = None
    """For a scheme with granules."""
    has_choices: bool = False
    """Whether any request has several answers."""


def granule_tokens(granule_bytes: int, n_layers: int = 1) -> int:
    """Returns how many tokens a granule holds.

    Args:
        granule_bytes: bytes of the granule, at least those of a token.
        n_layers: layers whose K, or V, is in the granule's tensor: one, or all.
    """
    return granule_bytes // (n_layers * N_KV_HEADS * HEAD_DIM * VALUE_BYTES)


def _granule_scheme(pool: Pool, *, shares: bool) -> PagedScheme:
    """Returns a scheme of contiguous virtual memory.

    A sequence has as many granules in each tensor, so they act as one page that takes an entry for each tensor.
    """
    granule = pool.granule
    assert granule is not None
    sharing: Sharing = "prefixes" if shares else "nothing"
    return PagedScheme(pool.n_slots, granule.n_tokens, sharing=sharing, n_entries_per_page=granule.n_tensors)


SCHEMES: Mapping[str, Callable[[Pool], ContiguousScheme | PagedScheme]] = {
    RESERVE_MAXIMUM: lambda pool: ContiguousScheme(
        BestFitAllocator(pool.n_slots), reserve_maximum(pool.max_model_len)
    ),
    RESERVE_POWER_OF_TWO: lambda pool: ContiguousScheme(
        BuddyAllocator(pool.n_slots), reserve_power_of_two(pool.max_model_len)
    ),
    "reserve-factor": lambda pool: ContiguousScheme(
        BestFitAllocator(pool.n_slots), reserve_factor(pool.max_model_len, pool.mean_answer)
    ),
    ORACLE: lambda pool: ContiguousScheme(BuddyAllocator(pool.n_slots), reserve_exact_length),
    "oracle-best-fit": lambda pool: ContiguousScheme(BestFitAllocator(pool.n_slots), reserve_exact_length),
    "resize": lambda pool: ContiguousScheme(BuddyAllocator(pool.n_slots), reserve_stored),
    "vattention": lambda pool: _granule_scheme(pool, shares=False),
    "vattention-shared": lambda pool: _granule_scheme(pool, shares=True),
    PAGED: lambda pool: PagedScheme(
        pool.n_slots, pool.page_size, sharing="choices" if pool.has_choices else "nothing"
    ),
    RADIX: lambda pool: PagedScheme(pool.n_slots, pool.page_size),
}
"""A function that makes each scheme, in the order of the report."""

WITH_GRANULES = ("vattention", "vattention-shared")
"""The schemes of contiguous virtual memory, in the second of which sequences share whole granules by prefix."""
