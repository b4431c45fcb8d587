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
"""The scheme whose largest batch and throughput those of ``RADIX`` are compared with."""
RESERVE_POWER_OF_TWO = "reserve-power-of-two"
ORACLE = "oracle"

N_LAYERS, N_KV_HEADS, HEAD_DIM, VALUE_BYTES = 32, 8, 128, 2
"""The KV cache whose granules are simulated: Llama 3.1 8B's, in 16 bits."""
N_TENSORS = 2 * N_LAYERS
"""Tensors that are mapped granule by granule: K and V of each layer."""


class Pool(NamedTuple):
    """What a scheme of contiguous memory has to know."""

    n_slots: int
    """Token slots of the pool."""
    max_model_len: int
    """Maximum tokens of a sequence."""
    mean_answer: float
    """Average tokens of an answer."""


CONTIGUOUS: Mapping[str, Callable[[Pool], ContiguousScheme]] = {
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
}
"""Factories of the schemes of contiguous memory."""

SHARES_GRANULES: Mapping[str, bool] = {"vattention": False, "vattention-shared": True}
"""The schemes of contiguous virtual memory, and whether sequences share whole granules by prefix."""

SHARES_PAGES: Mapping[str, bool] = {PAGED: False, RADIX: True}
"""The schemes of pages, and whether sequences share whole pages by prefix."""

SCHEMES = (*CONTIGUOUS, *SHARES_GRANULES, *SHARES_PAGES)
"""The names of all schemes, in the order of the report."""


def granule_tokens(granule_bytes: int) -> int:
    """Returns how many tokens of one layer's K, or V, a granule holds."""
    return granule_bytes // (N_KV_HEADS * HEAD_DIM * VALUE_BYTES)


def paged_scheme(name: str, n_slots: int, page_size: int) -> PagedScheme:
    """Returns one of ``SHARES_PAGES``."""
    return PagedScheme(n_slots, page_size, shares=SHARES_PAGES[name])


def granule_scheme(name: str, n_slots: int, granule_bytes: int) -> PagedScheme:
    """Returns one of ``SHARES_GRANULES``.

    A sequence has as many granules in each tensor, so they act as one page that takes an entry for each tensor.
    """
    return PagedScheme(
        n_slots,
        granule_tokens(granule_bytes),
        shares=SHARES_GRANULES[name],
        n_entries_per_page=N_TENSORS,
    )
