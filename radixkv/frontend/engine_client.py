"""What the API asks of the runtime, or of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from radixkv.errors import RequestError
from radixkv.frontend.arrival import Arrival
from radixkv.frontend.in_flight import EndedRequest, RequestMetrics
from radixkv.frontend.miss_counts import MissCounts
from radixkv.frontend.request_group import RequestGroup
from radixkv.wire.cache_messages import (
    Explained,
    Flushed,
    Invalidated,
    Matched,
    Outlined,
    Pinned,
    SessionClosed,
    Tier,
)
from radixkv.wire.messages import Submit
from radixkv.wire.namespace import CacheNamespace
from radixkv.wire.stats import Stats
from radixkv.wire.table_messages import Tabled


class EngineClient(Protocol):
    """Sends requests and queries to the runtime of a server, or to its replicas.

    Queries raise ``RequestError`` if they are refused, or not answered in time.
    """

    refusal: RequestError | None
    """The error that refuses new requests; None while the server accepts them."""

    @property
    def metrics(self) -> RequestMetrics:
        """Records latencies and finish reasons."""
        ...

    @property
    def on_end(self) -> list[Callable[[EndedRequest], None]]:
        """Called at the end of each request that a client sent."""
        ...

    @property
    def misses(self) -> MissCounts:
        """What ended requests did not find in the cache, since the start."""
        ...

    @property
    def n_restarts(self) -> int:
        """How often another runtime has taken the place of one that had died."""
        ...

    @property
    def runtimes(self) -> Sequence[EngineClient]:
        """The client of each runtime: this one alone, or those of the replicas in their order."""
        ...

    def submit(
        self,
        prompts: Sequence[Submit],
        *,
        arrived: Arrival,
        streams: bool = True,
        max_in_flight: int | None = None,
    ) -> RequestGroup:
        """Returns the prompts of one HTTP request as a group, which sends them when it is entered.

        Args:
            prompts: at least one.
            arrived: when and where the HTTP request arrived, and whose it is.
            streams: whether a client reads output as it arrives; one that falls too far behind fails.
            max_in_flight: most prompts that are sent at a time; others follow as these end. None: all.
        """
        ...

    def take_recent_misses(self) -> MissCounts:
        """Returns what requests that ended since the last call did not find in the cache."""
        ...

    async def idle(self) -> None:
        """Waits until nothing is in flight."""
        ...

    async def flush(self) -> Flushed:
        """Makes every cached prefix unreachable."""
        ...

    async def invalidate(
        self,
        tokens: bytes,
        namespace: CacheNamespace,
        *,
        all_adapters: bool = False,
        lowest_tier: Tier = "storage",
    ) -> Invalidated:
        """Drops what is cached of all sequences that begin with ``tokens``.

        Args:
            tokens: little-endian int32 ids, at least one page; none for everything in the namespace.
            namespace: that of the sequences.
            all_adapters: whether those of the model and of all adapters are meant; ``namespace`` then has none.
            lowest_tier: the tiers below it keep what they have.
        """
        ...

    async def close_session(self, session_id: str, namespace: CacheNamespace) -> SessionClosed:
        """Ends a session: what only it has cached is evicted first. Raises ``SessionNotFound``."""
        ...

    async def explain(self, tokens: bytes, namespace: CacheNamespace, *, contents: bool) -> Explained:
        """Asks how long the cached prefix of ``tokens`` is and why it ends there.

        Args:
            tokens: little-endian int32 ids.
            namespace: that of its requests.
            contents: whether the reply may tell tokens of other clients; without it, it is exact to pages only.
        """
        ...

    async def match(self, prompts: Sequence[bytes], namespace: CacheNamespace) -> Matched:
        """Asks how much of each prompt every tier has, and for the load.

        Args:
            prompts: little-endian int32 ids of each.
            namespace: that of its requests.
        """
        ...

    async def outline(self, *, contents: bool) -> Outlined:
        """Asks for the largest nodes of each tier's tree.

        Args:
            contents: whether the reply may tell tokens of clients.
        """
        ...

    async def tables(self, name: str = "", first: int = 0) -> Tabled:
        """Asks for the block tables of running requests. Raises ``RequestNotFound``.

        Args:
            name: the id of a reply or of an HTTP request, whose tables are told page by page. Empty: the counts of
                all requests.
            first: the first entry of each table to tell.
        """
        ...

    async def pin(self, tokens: bytes, namespace: CacheNamespace, ttl_s: float) -> Pinned:
        """Pins what is cached of ``tokens``, or ends their pin. Raises ``RequestError`` if pins are off.

        Args:
            tokens: little-endian int32 ids.
            namespace: that of its requests.
            ttl_s: for how long, in seconds; 0 ends the pin.
        """
        ...

    async def stats(self) -> Stats:
        """Returns counters and gauges as of now; dropped frames are summed over all processes."""
        ...

    def fail(self, error: RequestError) -> None:
        """Ends everything in flight with ``error``, which also refuses what comes later."""
        ...

    async def close(self) -> None:
        """Fails everything in flight, then closes the connections."""
        ...
