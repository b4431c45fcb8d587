"""The first turns of sessions, made ready before they are due."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from radixkv.bench.load.request_body import Post, Wording
from radixkv.bench.session import Session, Turns

AHEAD_BYTES = 1 << 26
"""Of bodies; beyond it no more is made ready. The prompts themselves take some times as much."""


@dataclass(frozen=True)
class Opened:
    """A session whose first turn is ready."""

    turns: Turns
    posts: list[Post]

    @property
    def n_bytes(self) -> int:
        return sum(len(post.body) for post in self.posts)


class Ahead:
    """Hands out sessions in order, each with its first turn.

    Args:
        sessions: in the order in which they begin.
        wording: of their requests.
    """

    def __init__(self, sessions: Sequence[Session], wording: Wording) -> None:
        self._coming = iter(sessions)
        self._wording = wording
        self._opened: deque[Opened] = deque()
        self._n_bytes = 0

    async def fill(self) -> None:
        """Makes as many ready as there is room for. O(their length)."""
        while self._n_bytes < AHEAD_BYTES and self._open_one():
            await asyncio.sleep(0)  # Ctrl-C comes through here

    def refill(self) -> None:
        """Makes the next one ready, if there is room."""
        if self._n_bytes < AHEAD_BYTES:
            self._open_one()

    def take(self) -> Opened:
        """The next one; there must be one."""
        if not self._opened:
            self._open_one()
        opened = self._opened.popleft()
        self._n_bytes -= opened.n_bytes
        return opened

    def close(self) -> None:
        """Ends the sessions that were not taken."""
        for opened in self._opened:
            opened.turns.close()

    def _open_one(self) -> bool:
        session = next(self._coming, None)
        if session is None:
            return False
        turns = session.turns()
        opened = Opened(turns, self._wording.posts(next(turns, ())))
        self._opened.append(opened)
        self._n_bytes += opened.n_bytes
        return True
