"""What a router has just sent to each server, which the server itself does not know yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

MEMORY_S = 10.0
"""A request that was sent longer ago has been scheduled, so that the server knows its prompt."""
MAX_QUESTIONS = 256
_CHUNK_BYTES = 4096


class RecentQuestions:
    """The questions of the requests that were sent in the last 10 s, at most 256.

    Requests that arrive together are sent before a server has scheduled the first of them. Without this, those that
    begin alike would go to different servers.
    """

    def __init__(self) -> None:
        self._sent: deque[tuple[float, Hashable, bytes]] = deque(maxlen=MAX_QUESTIONS)

    def add(self, server: Hashable, question: bytes, now_s: float) -> None:
        """Remembers that a request was sent to a server. O(1)."""
        self._sent.append((now_s, server, question))

    def shares(self, question: bytes, now_s: float) -> dict[Hashable, float]:
        """Returns, for each server, how much of a question equals the beginning of one that was sent there, 0 to 1.

        That is an estimate of how much of the prompt the server will have. O(bytes that are equal).
        """
        while self._sent and self._sent[0][0] < now_s - MEMORY_S:
            self._sent.popleft()
        shares: dict[Hashable, float] = {}
        for _, server, sent in self._sent:
            share = _n_equal(sent, question) / len(question)
            shares[server] = max(share, shares.get(server, 0.0))
        return shares


def _n_equal(a: bytes, b: bytes) -> int:
    """Returns the number of equal bytes at the beginning."""
    start = 0
    while (part := a[start : start + _CHUNK_BYTES]) and part == b[start : start + _CHUNK_BYTES]:
        start += len(part)
    rest = zip(part, b[start : start + _CHUNK_BYTES], strict=False)
    return start + next((n for n, (x, y) in enumerate(rest) if x != y), min(len(part), max(len(b) - start, 0)))
