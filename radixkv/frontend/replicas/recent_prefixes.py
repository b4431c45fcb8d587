"""Which servers prompts were sent to lately, by digests of their prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, NamedTuple

import xxhash

from radixkv.routing import Server

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


class RecentPrefixes(Generic[Server]):
    """Remembers what was sent to each server, as an estimate of what it has.

    A server may be too busy to say what it has, and it knows a prompt only once it has computed it.
    """

    def __init__(self) -> None:
        self._sent_at: dict[int, dict[Server, float]] = {}
        """Times in monotonic seconds, by digest and by server."""

    def add(self, prefixes: Sequence[Prefix], server: Server, now_s: float) -> None:
        """Remembers that a prompt was sent to a server. O(prefixes)."""
        for _, digest in prefixes:
            sent_at = self._sent_at.pop(digest, {})
            sent_at[server] = now_s
            self._sent_at[digest] = sent_at  # the last to go
        while len(self._sent_at) > MAX_DIGESTS:
            del self._sent_at[next(iter(self._sent_at))]

    def matched(self, prefixes: Sequence[Prefix], since: Mapping[Server, float]) -> dict[Server, int]:
        """Returns how many bytes of a prompt each server got earlier. O(prefixes * servers).

        Args:
            prefixes: of the prompt.
            since: for each server that counts, a time in monotonic seconds; what was sent before does not count.
        """
        matched: dict[Server, int] = {}
        for n_bytes, digest in prefixes:
            for server, sent_at in self._sent_at.get(digest, {}).items():
                if server in since and sent_at >= since[server]:
                    matched[server] = n_bytes
        return matched


def prefixes_of(prompt: bytes, namespace: bytes) -> list[Prefix]:
    """Returns prefixes of a prompt at lengths that are at most an eighth apart, or 64 bytes. O(bytes).

    Args:
        prompt: little-endian int32 ids, or other bytes that begin alike where prompts do.
        namespace: of the cache; equal prompts of different ones have different digests.
    """
    state, start, prefixes = xxhash.xxh3_64(namespace), 0, []
    view = memoryview(prompt)
    for n_bytes in _lengths(len(prompt)):
        state.update(view[start:n_bytes])
        prefixes.append(Prefix(n_bytes, state.intdigest()))
        start = n_bytes
    return prefixes


def _lengths(n_most: int) -> Iterator[int]:
    n_bytes = _STEP_BYTES
    while n_bytes <= n_most:
        yield n_bytes
        n_bytes += max(_STEP_BYTES, (1 << (n_bytes.bit_length() - 1)) // _N_STEPS)
