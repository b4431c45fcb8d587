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
from radixkv.lab.studies.paging.paged import PagedScheme

PAGED = "paged"
"""The engine without prefix caching."""
RADIX = "radix"
"""The engine as it is, to which the study's targets apply."""
RESERVE_MAXIMUM = "reserve-maximum"
"""The baseline, with which the largest batch and the throughput of ``RADIX`` are compared."""
RESERVE_POWER_OF_TWO = "reserve-power-of-two"
ORACLE = "oracle"

N_LAYERS, N_KV_HEADS, HEAD_DIM, VALUE_BYTES = 32, 8, 128, 2
"""The KV cache whose granules are simulated: Llama 3.1 8B's, in 16 bits."""
N_TENSORS = 2 * N_LAYERS
"""Tensors that are mapped granule by granule: K and V of each layer."""


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
    granule_bytes: int | None = None
    """Bytes of a granule, for a scheme with granules."""


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
    assert pool.granule_bytes is not None
    page_size = granule_tokens(pool.granule_bytes)
    return PagedScheme(pool.n_slots, page_size, shares=shares, n_entries_per_page=N_TENSORS)


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
    PAGED: lambda pool: PagedScheme(pool.n_slots, pool.page_size, shares=False),
    RADIX: lambda pool: PagedScheme(pool.n_slots, pool.page_size),
}
"""A function that makes each scheme, in the order of the report."""

WITH_GRANULES = ("vattention", "vattention-shared")
"""The schemes of contiguous virtual memory, in the second of which sequences share whole granules by prefix."""
