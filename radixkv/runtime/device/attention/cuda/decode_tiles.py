"""Which blocks of threads compute decode rows."""

from __future__ import annotations

from typing import Literal, NamedTuple

Variant = Literal["whole", "split", "shared"]
"""How rows are computed: each by one item; long ones by several, merged; shared pages once for many rows."""

_ROOM = 200_000
"""Bytes of shared memory, with which blocks fit that load ahead: they take up to 213,000; Hopper has 233,472."""


class Block(NamedTuple):
    """A block of threads of ``attend.attend``."""

    n_tokens: int
    """At a time."""
    n_stages: int
    n_warps: int
    is_ahead: bool
    """Whether page numbers are loaded one turn ahead. K and V of ``n_stages`` - 1 turns are on their way then, each
    with its room in shared memory; else those of one turn, whatever the stages."""
    token_ns: float
    """What a token of a turn takes a block that runs alone."""

    def ns(self, n_tokens: int) -> float:
        """What so many tokens take it."""
        return -(-n_tokens // self.n_tokens) * self.n_tokens * self.token_ns


_MANY = Block(32, 2, 2, is_ahead=False, token_ns=54.0)
_SEVERAL = Block(64, 3, 4, is_ahead=False, token_ns=27.0)
_UNEVEN = Block(64, 3, 4, is_ahead=True, token_ns=17.0)
_TWO = Block(64, 4, 4, is_ahead=True, token_ns=17.0)
"""A multiprocessor has room for two."""
_ONE = Block(128, 3, 8, is_ahead=True, token_ns=13.2)
_WIDE = Block(64, 2, 4, is_ahead=False, token_ns=50.0)
"""For heads of 256."""


def block_of(variant: Variant, n_blocks: int, n_processors: int, head_dim: int, shared_bytes: int) -> Block:
    """As measured on one H200: many small blocks where all have about the same to do; where few of them run, or
    some have far more to do than others, each must be fast alone.

    Args:
        n_blocks: of the launch, padding included.
        n_processors: multiprocessors.
        head_dim: of K and V; 128 where measured.
        shared_bytes: shared memory of a multiprocessor.
    """
    if variant == "shared" and n_blocks > 15 * n_processors:
        return _MANY
    if variant == "whole" and n_blocks >= 1024:
        return _MANY
    if head_dim > 128:
        return _WIDE
    if shared_bytes < _ROOM:
        return _SEVERAL
    if variant != "whole":
        return _UNEVEN
    if n_blocks > 2 * n_processors:
        return _SEVERAL
    return _TWO if n_blocks > n_processors else _ONE
