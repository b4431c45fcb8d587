"""Continuations of an answer that its own prompt and text suggest."""

from __future__ import annotations

from typing import NamedTuple

from radixkv.tree.node import TOKEN_BYTES

_MAX_MISALIGNED = 256
"""Limits the time for a prompt that was made for it."""


class Continuation(NamedTuple):
    """What followed the last tokens when they came before."""

    n_matched: int
    """Length of the repeated ending, in tokens."""
    tokens: bytes
    """What may follow, little-endian int32."""


def continue_text(tokens: bytearray, sizes: tuple[int, ...], n_tokens: int) -> Continuation | None:
    """Returns what followed the newest earlier place of the text's ending; None if the ending is new.

    A text that repeats itself is continued round after round. O(tokens) for each of ``sizes``: some 24 µs in all at
    32,000 random tokens.

    Args:
        tokens: prompt and answer, little-endian int32.
        sizes: lengths of endings to look for, ascending; the longest that is found decides.
        n_tokens: how many tokens to return, at least 1.
    """
    found = None
    for size in sizes:
        ending = tokens[-size * TOKEN_BYTES :]
        if len(ending) < size * TOKEN_BYTES or (end := _end_of_last(tokens, ending)) is None:
            break
        followers = bytes(tokens[end : end + n_tokens * TOKEN_BYTES])
        n_rounds = -(-n_tokens * TOKEN_BYTES // len(followers))
        found = Continuation(size, (followers * n_rounds)[: n_tokens * TOKEN_BYTES])
    return found


def _end_of_last(tokens: bytearray, ending: bytearray) -> int | None:
    """Returns where the last occurrence of ``ending`` ends that has a token after it; None if there is none.

    Gives up after some places that are not at the start of a token, where bytes of several tokens look the same.
    """
    place = tokens.rfind(ending, 0, len(tokens) - TOKEN_BYTES)
    for _ in range(_MAX_MISALIGNED):
        if place < 0 or place % TOKEN_BYTES == 0:
            break
        place = tokens.rfind(ending, 0, place + len(ending) - 1)
    return None if place < 0 or place % TOKEN_BYTES else place + len(ending)
