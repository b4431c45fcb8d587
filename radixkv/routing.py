"""The rule by which a router chooses a server for a prompt."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

MIN_MATCHED_SHARE = 0.3
"""Share of a prompt that a server must have for the prompt to go there; the default of smg."""
MAX_RELATIVE_LOAD = 1.5
"""A server gets no prompt for its match beyond this multiple of the mean load; the default of smg."""
MIN_EXCESS_REQUESTS = 4
"""A server is not called busy before it has so many requests more than the mean."""
RECENT_REQUESTS = 32
"""Requests for each server that a router remembers."""
USUAL_S = 2.0
"""Time constant with which what a server usually has in flight falls: turns of chats in lock step end and come back
within less."""

Server = TypeVar("Server", bound=Hashable)


def is_match(n_matched: int, n_tokens: int) -> bool:
    """Returns whether a server has enough of a prompt for the prompt to go there.

    Args:
        n_matched: tokens of the prompt that it has.
        n_tokens: of the prompt.
    """
    return n_matched > 0 and n_matched >= MIN_MATCHED_SHARE * n_tokens


class ServerChoice(Generic[Server]):
    """Chooses servers by what they have of a prompt and by their load.

    The server with the most of the prompt gets it, if it has at least 30% and is not busy: a busy one has more than
    1.5 times the mean load, and more than 4 requests above the mean, both with the requests that are in flight now
    and with how many usually are. Otherwise the server with the least load gets it.

    The load of a server is the number of its requests in flight, plus those that it got of the last 32 requests for
    each server. Requests that have ended count as well, because a server that gets most of the traffic, as it does
    when all prompts begin alike, has to cache most of it.

    What is usual rises at once, and falls to what is in flight within some two seconds. Chats whose turns end
    together come back together: those of one server may then be in flight while those of another are between two
    turns, which says nothing about the work that the servers have.
    """

    def __init__(self) -> None:
        self._recent: deque[Server] = deque()
        self._n_recent: dict[Server, int] = {}
        self._usual: dict[Server, float] = {}
        """What servers usually have in flight, of those that were there for the last prompt."""
        self._last_s = 0.0
        """When the last one came."""

    def choose(
        self, n_tokens: int, matched: Mapping[Server, int], in_flight: Mapping[Server, float], now_s: float
    ) -> Server:
        """Returns the server for a prompt, and counts it as sent there. O(servers).

        Args:
            n_tokens: of the prompt.
            matched: tokens of the prompt that each server has; the servers to choose from, at least one. Of equal
                servers the first one is chosen.
            in_flight: requests that each server has, or a weight of them; one that is missing has none.
            now_s: when it comes, in seconds of a clock that never goes back.
        """
        now = {server: in_flight.get(server, 0.0) for server in matched}
        loads = self._with_recent(now)
        self._measure(now, now_s)
        usual = self._with_recent(self._usual)
        limit, usual_limit = _busy_above(loads), _busy_above(usual)
        ready = [server for server in matched if loads[server] <= limit or usual[server] <= usual_limit]
        chosen = max(ready, key=lambda server: (matched[server], -loads[server]))
        if not is_match(matched[chosen], n_tokens):
            chosen = min(ready, key=loads.__getitem__)
        self._count(chosen, RECENT_REQUESTS * len(matched))
        return chosen

    def _with_recent(self, in_flight: Mapping[Server, float]) -> dict[Server, float]:
        return {server: number + self._n_recent.get(server, 0) for server, number in in_flight.items()}

    def _measure(self, in_flight: Mapping[Server, float], now_s: float) -> None:
        """Takes what servers have in flight now into what they usually have."""
        left = math.exp((self._last_s - now_s) / USUAL_S)
        self._last_s = now_s
        self._usual = {
            server: number + left * max(0.0, self._usual.get(server, 0.0) - number)
            for server, number in in_flight.items()
        }

    def _count(self, server: Server, n_kept: int) -> None:
        self._recent.append(server)
        self._n_recent[server] = self._n_recent.get(server, 0) + 1
        while len(self._recent) > n_kept:
            oldest = self._recent.popleft()
            self._n_recent[oldest] -= 1
            if not self._n_recent[oldest]:
                del self._n_recent[oldest]


def _busy_above(loads: Mapping[Server, float]) -> float:
    """Returns the load above which a server is busy."""
    mean = sum(loads.values()) / len(loads)
    return max(MAX_RELATIVE_LOAD * mean, mean + MIN_EXCESS_REQUESTS)
