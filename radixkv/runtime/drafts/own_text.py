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

    A text that repeats itself is continued round after round. O(tokens): 4 µs for a short text and 13 µs for 32,000
    tokens, 27 µs if the text repeats short endings only.

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
    endings = [(size, tokens[-size * TOKEN_BYTES :]) for size in sizes]
    place, n_matched, last = len(places), 0, 0
    for _ in range(_MAX_PLACES):
        place = places.rfind(b"\1", 0, place)
        if place < 0 or n_matched == sizes[-1]:
            break
        end = (place + n_compared) * TOKEN_BYTES
        for size, ending in endings:
            if size > n_matched:
                if tokens[max(0, end - len(ending)) : end] != ending:
                    break
                n_matched, last = size, end
    if not n_matched:
        return None
    followers = bytes(tokens[last : last + n_tokens * TOKEN_BYTES])
    n_rounds = -(-n_tokens * TOKEN_BYTES // len(followers))
    return Continuation(n_matched, (followers * n_rounds)[: n_tokens * TOKEN_BYTES])
