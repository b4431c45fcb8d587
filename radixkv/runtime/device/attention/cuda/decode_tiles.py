"""Tile configurations of the decode kernel."""

from __future__ import annotations

from typing import Literal, NamedTuple

Variant = Literal["whole", "split", "shared", "extend"]
"""How decode rows are computed: ``whole``, one work item per row; ``split``, long rows as several items that are
merged; ``shared``, shared pages read once for many rows; ``extend``, pages also read once for consecutive tokens of
a request, which are drafts or a short prompt."""

_MIN_SHARED_BYTES_AHEAD = 200_000
"""Shared memory per multiprocessor from which configurations that load ahead fit: they take up to 213,000 bytes;
Hopper has 233,472."""


class TileConfig(NamedTuple):
    """Tile size and launch parameters of a thread block of ``decode_kernel.attend_decode``."""

    n_tokens: int
    """Tokens per loop iteration."""
    n_stages: int
    n_warps: int
    is_ahead: bool
    """Whether page ids are loaded one iteration ahead. Then K and V of ``n_stages`` - 1 iterations are in flight,
    each in its own shared memory; otherwise those of one iteration, whatever ``n_stages`` is."""
    token_ns: float
    """Nanoseconds per token of a block that runs alone."""

    def estimated_ns(self, n_tokens: int) -> float:
        """Estimates how long a block that runs alone takes for ``n_tokens`` tokens."""
        return -(-n_tokens // self.n_tokens) * self.n_tokens * self.token_ns


_MANY_BLOCKS = TileConfig(32, 2, 2, is_ahead=False, token_ns=54.0)
_MANY_BLOCKS_OF_8_BITS = TileConfig(32, 3, 2, is_ahead=True, token_ns=24.0)
_SEVERAL_BLOCKS = TileConfig(64, 3, 4, is_ahead=False, token_ns=27.0)
_UNEVEN_BLOCKS = TileConfig(64, 3, 4, is_ahead=True, token_ns=17.0)
_TWO_BLOCKS = TileConfig(64, 4, 4, is_ahead=True, token_ns=17.0)
"""Two blocks fit a multiprocessor."""
_ONE_BLOCK = TileConfig(128, 3, 8, is_ahead=True, token_ns=13.2)
_WIDE_HEADS = TileConfig(64, 2, 4, is_ahead=False, token_ns=50.0)
"""Heads of size 256."""
_WIDEST_HEADS = TileConfig(32, 2, 8, is_ahead=False, token_ns=100.0)
"""Heads of size 512, which are not split. Queries and sums of 16 pairs take 98 registers of each of 256 threads,
those of 32 pairs 147; with 4 warps the latter take more than the 255 that there are. K and V of 32 tokens take
64 KiB of shared memory and 32 queries 32 KiB, which fits the 99 KiB that every supported GPU has. The time is twice
that of heads of 256; it was not measured."""


def choose_tile_config(
    variant: Variant, n_blocks: int, n_processors: int, head_dim: int, shared_bytes: int, *, has_8_bits: bool
) -> TileConfig:
    """Returns the configuration that was fastest on an H200.

    Many small blocks are best where all have about the same work. Where few blocks run, or some have far more work
    than others, each block must be fast alone.

    Args:
        variant: how the rows are computed.
        n_blocks: thread blocks of the launch, padding included.
        n_processors: multiprocessors of the GPU.
        head_dim: of K and V; measured with 128. Heads of 512 have one configuration.
        shared_bytes: shared memory of a multiprocessor.
        has_8_bits: whether K and V have 8 bits.
    """
    if head_dim > 256:
        return _WIDEST_HEADS
    loads_ahead = shared_bytes >= _MIN_SHARED_BYTES_AHEAD and head_dim <= 128
    if has_8_bits and loads_ahead and variant == "whole" and n_blocks > 2 * n_processors:
        return _MANY_BLOCKS_OF_8_BITS
    if variant == "shared" and n_blocks > 15 * n_processors:
        return _MANY_BLOCKS
    if variant == "whole" and n_blocks >= 1024:
        return _MANY_BLOCKS
    if head_dim > 128:
        return _WIDE_HEADS
    if not loads_ahead:
        return _SEVERAL_BLOCKS
    if variant != "whole":
        return _UNEVEN_BLOCKS
    if n_blocks > 2 * n_processors:
        return _SEVERAL_BLOCKS
    return _TWO_BLOCKS if n_blocks > n_processors else _ONE_BLOCK
