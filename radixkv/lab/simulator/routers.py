"""Routers of a simulation: what each knows of the servers, and which one it chooses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal

from radixkv.routing import ServerChoice
from radixkv.runtime.events.messages import AllBlocksCleared, BlockRemoved, BlockStored, Event

Routing = Literal["round-robin", "prefix", "events", "replicas"]
"""What a router knows: nothing (``round-robin``), the prompts that it sent itself (``prefix``), or which pages each
server has (``events``). ``replicas`` is no router, but the placement among the replicas of one server."""


class Router(ABC):
    """Chooses a server for each prompt in turn."""

    @abstractmethod
    def choose(self, n_tokens: int, hashes: Sequence[int]) -> int:
        """Returns the index of the server that gets a prompt.

        Args:
            n_tokens: tokens of the prompt.
            hashes: chained hash of each whole page of the prompt.
        """

    def receive(self, server: int, events: Sequence[Event]) -> None:  # noqa: B027
        """Takes the events of a server after it has finished its last prompt; most routers ignore them."""


def open_router(routing: Routing, n_servers: int, page_size: int, events_delay: int) -> Router:
    """Returns a new router.

    Args:
        routing: what it knows.
        n_servers: at least 1.
        page_size: tokens per page.
        events_delay: prompts that ``events`` chooses a server for before it learns what the events of one say.
    """
    if routing == "round-robin":
        return RoundRobinRouter(n_servers)
    if routing == "prefix":
        return PrefixRouter(n_servers, page_size)
    assert routing == "events", "replicas have no router"
    return EventsRouter(n_servers, page_size, events_delay)


class RoundRobinRouter(Router):
    """Gives each server a prompt in turn.

    Args:
        n_servers: at least 1.
    """

    def __init__(self, n_servers: int) -> None:
        self._n_servers = n_servers
        self._n_sent = 0

    def choose(self, n_tokens: int, hashes: Sequence[int]) -> int:
        """See ``Router``. O(1)."""
        server = self._n_sent % self._n_servers
        self._n_sent += 1
        return server


class PrefixRouter(Router):
    """Takes every page that it has sent to a server to be there still.

    Args:
        n_servers: at least 1.
        page_size: tokens per page.
    """

    def __init__(self, n_servers: int, page_size: int) -> None:
        self._page_size = page_size
        self._choice: ServerChoice[int] = ServerChoice()
        self._sent: list[set[int]] = [set() for _ in range(n_servers)]

    def choose(self, n_tokens: int, hashes: Sequence[int]) -> int:
        """See ``Router``. O(servers + pages that they have of it)."""
        matched = {n: self._page_size * _n_leading(hashes, pages) for n, pages in enumerate(self._sent)}
        server = self._choice.choose(n_tokens, matched, {}, 0.0)
        self._sent[server].update(hashes)
        return server


class EventsRouter(Router):
    """Follows the events of all servers, which arrive late, but all and in order.

    Args:
        n_servers: at least 1.
        page_size: tokens per page.
        delay: prompts that it chooses a server for before it learns what the events of one say.
    """

    def __init__(self, n_servers: int, page_size: int, delay: int) -> None:
        self._page_size = page_size
        self._delay = delay
        self._choice: ServerChoice[int] = ServerChoice()
        self._tiers_with: list[Counter[int]] = [Counter() for _ in range(n_servers)]
        """For each server: how many of its tiers have the page with a hash."""
        self._under_way: deque[tuple[int, int, Sequence[Event]]] = deque()
        self._n_chosen = 0

    def choose(self, n_tokens: int, hashes: Sequence[int]) -> int:
        """See ``Router``. O(servers + pages that they have of it + pages of the events that arrive)."""
        while self._under_way and self._under_way[0][0] + self._delay <= self._n_chosen:
            _, server, events = self._under_way.popleft()
            self._apply(self._tiers_with[server], events)
        matched = {n: self._page_size * _n_leading(hashes, pages) for n, pages in enumerate(self._tiers_with)}
        self._n_chosen += 1
        return self._choice.choose(n_tokens, matched, {}, 0.0)

    def receive(self, server: int, events: Sequence[Event]) -> None:
        """See ``Router``. O(1)."""
        if events:
            self._under_way.append((self._n_chosen, server, events))

    def _apply(self, tiers_with: Counter[int], events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case BlockStored(block_hashes=hashes):
                    tiers_with.update(hashes)
                case BlockRemoved(block_hashes=hashes):
                    for block_hash in hashes:
                        tiers_with[block_hash] -= 1
                        if not tiers_with[block_hash]:
                            del tiers_with[block_hash]
                case AllBlocksCleared():
                    tiers_with.clear()


def _n_leading(hashes: Sequence[int], pages: set[int] | Counter[int]) -> int:
    """Returns the number of pages from the start of a prompt that are among ``pages``."""
    return next((n for n, page in enumerate(hashes) if page not in pages), len(hashes))
