"""Preparation of sessions' first turns before they are due."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from radixkv.bench.load.request_body import PreparedRequest, RequestBuilder
from radixkv.bench.session import Session, Turns

MAX_PREFETCHED_BYTES = 1 << 26
"""Limit of the prepared bodies; the prompts themselves take several times as much memory."""


@dataclass(frozen=True)
class PreparedSession:
    """A session whose first turn is ready to be sent."""

    turns: Turns
    requests: list[PreparedRequest]
    """The requests of the first turn."""

    @property
    def n_bytes(self) -> int:
        return sum(len(request.body) for request in self.requests)


class SessionPrefetcher:
    """Hands out sessions in order, each with its first turn prepared.

    Args:
        sessions: the sessions in the order in which they start.
        builder: builds the bodies of their requests.
    """

    def __init__(self, sessions: Sequence[Session], builder: RequestBuilder) -> None:
        self._upcoming = iter(sessions)
        self._builder = builder
        self._prepared: deque[PreparedSession] = deque()
        self._n_bytes = 0

    async def fill(self) -> None:
        """Prepares sessions up to ``MAX_PREFETCHED_BYTES``. O(length of their prompts)."""
        while self._n_bytes < MAX_PREFETCHED_BYTES and self._prepare_next():
            await asyncio.sleep(0)  # lets Ctrl-C cancel the run

    def refill(self) -> None:
        """Prepares the next session unless ``MAX_PREFETCHED_BYTES`` are prepared."""
        if self._n_bytes < MAX_PREFETCHED_BYTES:
            self._prepare_next()

    def take(self) -> PreparedSession:
        """Returns the next session; there must be one."""
        if not self._prepared:
            self._prepare_next()
        session = self._prepared.popleft()
        self._n_bytes -= session.n_bytes
        return session

    def close(self) -> None:
        """Closes the sessions that were not taken."""
        for session in self._prepared:
            session.turns.close()

    def _prepare_next(self) -> bool:
        session = next(self._upcoming, None)
        if session is None:
            return False
        turns = session.turns()
        prepared = PreparedSession(turns, self._builder.build(next(turns, ())))
        self._prepared.append(prepared)
        self._n_bytes += prepared.n_bytes
        return True
