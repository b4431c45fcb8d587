"""Continuations of an answer that its own prompt and text suggest."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from radixkv.tree.node import TOKEN_BYTES

_N_COMPARED = 3
"""Tokens of an ending that are compared with all places at once; the others one place after another."""
_MAX_PLACES = 32
"""Newest places that are looked at, which limits the time for a prompt that was made for it."""


class Continuation(NamedTuple):
    """What followed the last tokens when they came before."""

    n_matched: int
    """Length of the repeated ending, in tokens."""
    tokens: bytes
    """What may follow, little-endian int32."""


def continue_text(tokens: bytearray, sizes: tuple[int, ...], n_tokens: int) -> Continuation | None:
    """Returns what followed the newest earlier place of the text's ending; None if the ending is new.

    A text that repeats itself is continued round after round. O(tokens): 5 µs for a short text, 14 µs for 32,000
    tokens, and 22 µs if these were made to be slow.

    Args:
        tokens: prompt and answer, little-endian int32.
        sizes: lengths of endings to look for, ascending; the longest that is found decides.
        n_tokens: how many tokens to return, at least 1.
    """
    ids = np.frombuffer(tokens, np.int32)
    if len(ids) <= sizes[0]:
        return None
    n_compared = min(sizes[0], _N_COMPARED)
    is_alike = ids[n_compared - 1 : -1] == ids[-1]
    for n_before in range(1, n_compared):
        is_alike &= ids[n_compared - 1 - n_before : -1 - n_before] == ids[-1 - n_before]
    places = is_alike.tobytes()  # a search in bytes is faster than one in an array
    endings = [tokens[-size * TOKEN_BYTES :] for size in sizes]
    place, n_found, last = len(places), 0, 0
    for _ in range(_MAX_PLACES):
        place = places.rfind(b"\1", 0, place)
        if place < 0 or n_found == len(endings):
            break
        end = (place + n_compared) * TOKEN_BYTES
        while n_found < len(endings) and tokens.endswith(endings[n_found], 0, end):
            n_found, last = n_found + 1, end
    if not n_found:
        return None
    followers = bytes(tokens[last : last + n_tokens * TOKEN_BYTES])
    n_rounds = -(-n_tokens * TOKEN_BYTES // len(followers))
    return Continuation(sizes[n_found - 1], (followers * n_rounds)[: n_tokens * TOKEN_BYTES])
