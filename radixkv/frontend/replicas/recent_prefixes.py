"""Which replicas prompts were sent to lately, by digests of their prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash

MAX_DIGESTS = 1 << 16
"""Digests that are kept; those that were sent least recently go first."""
_STEP_BYTES = 64
"""Distance of the first lengths: 16 tokens."""
_N_STEPS = 8
"""Lengths of one power of two, from the one on where steps get longer."""


class Prefix(NamedTuple):
    """A prefix of a prompt."""

    n_bytes: int
    digest: int


class RecentPrefixes:
    """Remembers what was sent to each replica, as an estimate of what it has.

    A replica may be too busy to say what it has, and it knows a prompt only once it has computed it.
    """

    def __init__(self) -> None:
        self._sent_at: dict[int, dict[int, float]] = {}
        """Times in monotonic seconds, by digest and by replica."""

    def add(self, prefixes: Sequence[Prefix], replica: int, now_s: float) -> None:
        """Remembers that a prompt was sent to a replica. O(prefixes)."""
        for _, digest in prefixes:
            sent_at = self._sent_at.pop(digest, {})
            sent_at[replica] = now_s
            self._sent_at[digest] = sent_at  # the last to go
        while len(self._sent_at) > MAX_DIGESTS:
            del self._sent_at[next(iter(self._sent_at))]

    def matched(self, prefixes: Sequence[Prefix], since: Sequence[float]) -> dict[int, int]:
        """Returns how many bytes of a prompt each replica got earlier. O(prefixes * replicas).

        Args:
            prefixes: of the prompt.
            since: for each replica, a time in monotonic seconds; what was sent before does not count.
        """
        matched: dict[int, int] = {}
        for n_bytes, digest in prefixes:
            for replica, sent_at in self._sent_at.get(digest, {}).items():
                if sent_at >= since[replica]:
                    matched[replica] = n_bytes
        return matched


def prefixes_of(tokens: bytes, namespace: bytes) -> list[Prefix]:
    """Returns prefixes of a prompt at lengths that are at most an eighth apart, or 16 tokens. O(bytes).

    Args:
        tokens: little-endian int32 ids.
        namespace: of the cache; equal tokens of different ones have different digests.
    """
    state, start, prefixes = xxhash.xxh3_64(namespace), 0, []
    view = memoryview(tokens)
    for n_bytes in _lengths(len(tokens)):
        state.update(view[start:n_bytes])
        prefixes.append(Prefix(n_bytes, state.intdigest()))
        start = n_bytes
    return prefixes


def _lengths(n_most: int) -> Iterator[int]:
    n_bytes = _STEP_BYTES
    while n_bytes <= n_most:
        yield n_bytes
        n_bytes += max(_STEP_BYTES, (1 << (n_bytes.bit_length() - 1)) // _N_STEPS)
