"""The client of several runtimes, which gives each prompt to one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from radixkv.errors import RequestError, SessionNotFound
from radixkv.frontend.arrival import Arrival
from radixkv.frontend.http.errors import RuntimeRestarting
from radixkv.frontend.in_flight import EndedRequest, InFlightRequest, RequestMetrics
from radixkv.frontend.miss_counts import MissCounts, MissRecord
from radixkv.frontend.replicas.joint_replies import best_match, joint_outline, sum_counts, sum_stats
from radixkv.frontend.replicas.placement import Placement
from radixkv.frontend.request_group import RequestGroup
from radixkv.frontend.runtime_client import RuntimeClient
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
from radixkv.wire.stats import Stats

ReplyT = TypeVar("ReplyT")


class ReplicasClient:
    """An ``EngineClient`` of several runtimes.

    A prompt goes to the runtime that ``Placement`` chooses of those that take requests. Flushes, invalidations and
    ends of sessions go to all, and fail if one is down, which may still have pages on disk. Other queries are
    answered by those that are up.

    Args:
        replicas: the clients of the runtimes, in their order; they record to ``metrics`` and ``misses``.
        metrics: records latencies and finish reasons.
        misses: records what requests do not find in the cache.
        placement: chooses; None: by default limits.
    """

    def __init__(
        self,
        replicas: Sequence[RuntimeClient],
        metrics: RequestMetrics,
        misses: MissRecord,
        placement: Placement | None = None,
    ) -> None:
        self.metrics = metrics
        """Records latencies and finish reasons."""
        self.on_end: list[Callable[[EndedRequest], None]] = []
        """Called at the end of each request that a client sent."""
        self._replicas = tuple(replicas)
        self._misses = misses
        self._placement = placement or Placement(len(replicas))
        self._sent_to: dict[str, RuntimeClient] = {}
        """By the id of each request that was sent and has not been abandoned."""

    @property
    def refusal(self) -> RequestError | None:
        """The error that refuses new requests; None while a replica takes them."""
        refusals = [replica.refusal for replica in self._replicas]
        if None in refusals:
            return None
        return next((one for one in refusals if isinstance(one, RuntimeRestarting)), refusals[0])

    @refusal.setter
    def refusal(self, error: RequestError | None) -> None:
        for replica in self._replicas:
            replica.refusal = error

    @property
    def misses(self) -> MissCounts:
        """What ended requests did not find in the cache, since the start."""
        return self._misses.total

    @property
    def n_restarts(self) -> int:
        """How often a runtime has taken the place of one that had died."""
        return sum(replica.n_restarts for replica in self._replicas)

    def submit(self, prompts: Sequence[Submit], *, arrived: Arrival, streams: bool = True) -> RequestGroup:
        """See ``EngineClient.submit``. The prompts of one group may go to several replicas."""
        return RequestGroup(self, prompts, arrived, streams)

    def take_recent_misses(self) -> MissCounts:
        """See ``EngineClient.take_recent_misses``."""
        return self._misses.take_recent()

    async def send_requests(self, requests: Sequence[InFlightRequest]) -> None:
        """Sends all prompts or none. Waits for replicas that say what they have. Raises ``RequestError``."""
        prompts = [request.prompt for request in requests]
        found = await self._placement.probe(self._accepting(), prompts)
        replicas = self._accepting()  # one may have died meanwhile
        sent: list[InFlightRequest] = []
        try:
            for index, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
                of_prompt = {number: lengths[index] for number, lengths in found.items() if index < len(lengths)}
                replica = replicas[self._placement.choose(prompt, replicas, of_prompt)]
                await replica.send_requests([request])
                self._sent_to[request.id] = replica
                sent.append(request)
        except BaseException:
            for request in sent:
                self.abandon(request)
            raise

    def cancel(self, request: InFlightRequest, choice: int | None = None) -> None:
        """Asks the runtime to end a request, or one choice of it. Does nothing if the request has ended."""
        if (replica := self._sent_to.get(request.id)) is not None:
            replica.cancel(request, choice)

    def abandon(self, request: InFlightRequest) -> None:
        """Cancels a request and drops its later output."""
        if (replica := self._sent_to.pop(request.id, None)) is not None:
            replica.abandon(request)

    async def idle(self) -> None:
        """Waits until nothing is in flight."""
        for replica in self._replicas:
            await replica.idle()

    async def flush(self) -> Flushed:
        """Makes every cached prefix unreachable, in all replicas."""
        return sum_counts(await asyncio.gather(*(replica.flush() for replica in self._replicas)))

    async def invalidate(
        self, tokens: bytes, cache_salt: str, *, tenant: str, lowest_tier: Tier = "storage"
    ) -> Invalidated:
        """See ``EngineClient.invalidate``; in all replicas."""
        queries = (
            replica.invalidate(tokens, cache_salt, tenant=tenant, lowest_tier=lowest_tier)
            for replica in self._replicas
        )
        return sum_counts(await asyncio.gather(*queries))

    async def close_session(self, session_id: str, cache_salt: str, *, tenant: str) -> SessionClosed:
        """See ``EngineClient.close_session``; in all replicas that know the session."""
        queries = (replica.close_session(session_id, cache_salt, tenant=tenant) for replica in self._replicas)
        replies = await asyncio.gather(*queries, return_exceptions=True)
        closed, not_found = [], None
        for reply in replies:
            if isinstance(reply, SessionClosed):
                closed.append(reply)
            elif isinstance(reply, SessionNotFound):
                not_found = reply
            else:
                raise reply
        if not closed:
            assert not_found is not None, "there is a replica"
            raise not_found
        return sum_counts(closed)

    async def explain(self, tokens: bytes, cache_salt: str, *, tenant: str, contents: bool) -> Explained:
        """See ``EngineClient.explain``; the answer of the replica that has the most of the prompt."""
        replies = await self._ask(
            lambda replica: replica.explain(tokens, cache_salt, tenant=tenant, contents=contents)
        )
        return max(replies.values(), key=lambda explained: explained.n_cached)

    async def match(self, prompts: Sequence[bytes], cache_salt: str, *, tenant: str) -> Matched:
        """See ``EngineClient.match``; for each prompt, what that replica has which has the most of it."""
        replies = await self._ask(lambda replica: replica.match(prompts, cache_salt, tenant=tenant))
        return best_match(list(replies.values()))

    async def outline(self, *, contents: bool) -> Outlined:
        """See ``EngineClient.outline``; the trees of all replicas that are up."""
        replies = await self._ask(lambda replica: replica.outline(contents=contents))
        return joint_outline(list(replies.values()))

    async def pin(self, tokens: bytes, cache_salt: str, ttl_s: float, *, tenant: str) -> Pinned:
        """Pins what is cached of ``tokens`` in the replica that has the most of it; ends a pin in all replicas.

        Args and errors are those of ``EngineClient.pin``.
        """
        if ttl_s:
            replies = await self._ask(lambda replica: replica.match([tokens], cache_salt, tenant=tenant))
            matches = {index: reply.prompts[0] for index, reply in replies.items()}
            chosen = max(matches, key=lambda index: matches[index].n_on_device + matches[index].n_in_host)
            return await self._replicas[chosen].pin(tokens, cache_salt, ttl_s, tenant=tenant)
        pinned = await self._ask(lambda replica: replica.pin(tokens, cache_salt, ttl_s, tenant=tenant))
        return max(pinned.values(), key=lambda one: one.n_pinned)

    async def stats(self) -> Stats:
        """Returns the sums of the replicas that answer, and in ``Stats.replicas`` the most important of each."""
        stats = await self._ask(lambda replica: replica.stats())
        return sum_stats(stats, [replica.n_restarts for replica in self._replicas])

    def fail(self, error: RequestError) -> None:
        """Ends everything in flight with ``error``, which also refuses what comes later."""
        for replica in self._replicas:
            replica.fail(error)

    async def close(self) -> None:
        """Fails everything in flight, then closes the connections."""
        for replica in self._replicas:
            await replica.close()

    def _accepting(self) -> dict[int, RuntimeClient]:
        """Returns the replicas that take requests, by number, at least one. Raises ``refusal`` if there is none."""
        if (refusal := self.refusal) is not None:
            raise refusal.with_traceback(None)
        return {index: replica for index, replica in enumerate(self._replicas) if replica.refusal is None}

    async def _ask(self, query: Callable[[RuntimeClient], Awaitable[ReplyT]]) -> dict[int, ReplyT]:
        """Returns the replies of the replicas that answer, by number.

        Raises:
            RequestError: none answers; the error of the first one.
        """
        replies = await asyncio.gather(*map(query, self._replicas), return_exceptions=True)
        answers: dict[int, ReplyT] = {}
        errors: list[BaseException] = []
        for index, reply in enumerate(replies):
            if isinstance(reply, BaseException):
                errors.append(reply)
            else:
                answers[index] = reply
        for error in errors:
            if not answers or not isinstance(error, RequestError):
                raise error
        return answers
