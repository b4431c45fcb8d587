"""The client of several runtimes, which gives each prompt to one of them."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from radixkv.errors import RequestError, RuntimeDied, SessionNotFound
from radixkv.frontend.arrival import Arrival
from radixkv.frontend.http.errors import RuntimeRestarting, request_not_found
from radixkv.frontend.in_flight import EndedRequest, InFlightRequest, RequestMetrics
from radixkv.frontend.miss_counts import MissCounts, MissRecord
from radixkv.frontend.replicas.joint_replies import best_match, joint_outline, joint_tables, sum_counts
from radixkv.frontend.replicas.joint_stats import JointStats
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
    Stored,
    Tier,
)
from radixkv.wire.messages import Submit
from radixkv.wire.namespace import CacheNamespace
from radixkv.wire.stats import Stats
from radixkv.wire.table_messages import Tabled

ReplyT = TypeVar("ReplyT")

SILENT_S = 5.0
"""A replica that has sent nothing for so long gets no requests while another one speaks. It sends heartbeats, but
none within a step."""
MAX_PAUSES = 1 << 14
"""Pauses of which the frontend knows which replica has them; a runtime waits for a thousand at most."""
STRAGGLER_LIMIT_S = 1.0
"""How long a query waits for other replicas once one has answered."""


class _Sent(NamedTuple):
    """Where a request is."""

    number: int
    """The number of its replica."""
    found: Mapping[int, int]
    """How many tokens of its prompt each replica has that has said so."""
    full: frozenset[int] = frozenset()
    """The replicas that have refused it because their queues are full."""


class ReplicasClient:
    """An ``EngineClient`` of several runtimes.

    A prompt goes to the runtime that ``Placement`` chooses of those that take requests. If its queue is full, the
    prompt goes to the one that is chosen of the others, and fails only when the queues of all are full. Flushes and
    invalidations go to all, and fail if one is down that has pages on disk. Other queries are answered by those
    that are up.

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
        self.runtimes = tuple(replicas)
        """The client of each replica, in their order."""
        self._misses = misses
        self._placement = placement or Placement()
        self._stats = JointStats(len(replicas))
        self._paused: OrderedDict[str, int] = OrderedDict()
        """The replica that has a pause, by the id of the request whose answer began it; the oldest first."""
        self._sent: dict[str, _Sent] = {}
        """By the id of each request that was sent and has not been abandoned."""
        for replica in self.runtimes:
            replica.send_elsewhere = self._send_elsewhere

    @property
    def refusal(self) -> RequestError | None:
        """The error that refuses new requests; None while a replica takes them."""
        refusals = [replica.refusal for replica in self.runtimes]
        return None if None in refusals else _soonest([one for one in refusals if one is not None])

    @refusal.setter
    def refusal(self, error: RequestError | None) -> None:
        for replica in self.runtimes:
            replica.refusal = error

    @property
    def misses(self) -> MissCounts:
        """What ended requests did not find in the cache, since the start."""
        return self._misses.total

    @property
    def n_restarts(self) -> int:
        """How often a runtime has taken the place of one that had died."""
        return sum(replica.n_restarts for replica in self.runtimes)

    def submit(
        self,
        prompts: Sequence[Submit],
        *,
        arrived: Arrival,
        streams: bool = True,
        max_in_flight: int | None = None,
    ) -> RequestGroup:
        """See ``EngineClient.submit``. The prompts of one group may go to several replicas."""
        return RequestGroup(self, prompts, arrived, streams, max_in_flight)

    def take_recent_misses(self) -> MissCounts:
        """See ``EngineClient.take_recent_misses``."""
        return self._misses.take_recent()

    async def send_requests(self, requests: Sequence[InFlightRequest], *, are_first: bool) -> None:
        """See ``RequestSender.send_requests``. Waits for replicas that say what they have."""
        prompts = [request.prompt for request in requests]
        found = await self._placement.probe(self._accepting(are_first=are_first), prompts)
        replicas = self._accepting(are_first=are_first)  # one may have died meanwhile
        try:
            for index, request in enumerate(requests):
                of_prompt = {number: lengths[index] for number, lengths in found.items() if index < len(lengths)}
                self._send(request, replicas, of_prompt, are_first=are_first)
        except BaseException:
            for request in requests:
                self.abandon(request)
            raise

    def expect(self, n_more: int) -> None:
        """See ``RequestSender.expect``."""
        self.runtimes[0].expect(n_more)  # the one for whose idleness is waited first

    def cancel(self, request: InFlightRequest, choice: int | None = None) -> None:
        """Asks the runtime to end a request, or one choice of it. Does nothing if the request has ended."""
        if (sent := self._sent.get(request.id)) is not None:
            self.runtimes[sent.number].cancel(request, choice)

    def abandon(self, request: InFlightRequest) -> None:
        """Cancels a request and drops its later output; ends the pause that another replica has of its chat."""
        if (sent := self._sent.pop(request.id, None)) is None:
            return
        self.runtimes[sent.number].abandon(request)
        resumed = request.prompt.resumes
        paused = self._paused.pop(resumed, None) if request.has_begun else None
        if paused is not None and paused != sent.number:
            self.runtimes[paused].end_pause(resumed)

    def begin_pause(self, request: InFlightRequest, tools: Sequence[str]) -> None:
        """See ``RequestSender.begin_pause``."""
        if (sent := self._sent.get(request.id)) is not None:
            self.runtimes[sent.number].begin_pause(request, tools)
            self._paused[request.id] = sent.number
            while len(self._paused) > MAX_PAUSES:
                self._paused.popitem(last=False)

    async def idle(self) -> None:
        """Waits until nothing is in flight, and no group that has begun will send more."""
        while not all(replica.is_idle for replica in self.runtimes):  # one may get what another one has refused
            for replica in self.runtimes:
                await replica.idle()

    async def flush(self) -> Flushed:
        """Makes every cached prefix unreachable, in all replicas."""
        return sum_counts(await self._order(lambda replica: replica.flush()))

    async def invalidate(
        self,
        tokens: bytes,
        namespace: CacheNamespace,
        *,
        all_adapters: bool = False,
        lowest_tier: Tier = "storage",
    ) -> Invalidated:
        """See ``EngineClient.invalidate``; in all replicas."""
        return sum_counts(
            await self._order(
                lambda replica: replica.invalidate(
                    tokens, namespace, all_adapters=all_adapters, lowest_tier=lowest_tier
                )
            )
        )

    async def close_session(self, session_id: str, namespace: CacheNamespace) -> SessionClosed:
        """See ``EngineClient.close_session``; in all replicas that know the session. Who is down knows none."""
        queries = (replica.close_session(session_id, namespace) for replica in self.runtimes)
        closed, errors = _parted(await asyncio.gather(*queries, return_exceptions=True))
        for error in errors.values():
            if not isinstance(error, SessionNotFound | RuntimeDied | RuntimeRestarting):
                raise error
        if not closed:
            unknown = [error for error in errors.values() if isinstance(error, SessionNotFound)]
            raise unknown[0] if unknown else _soonest(errors.values())
        return sum_counts(list(closed.values()))

    async def explain(self, tokens: bytes, namespace: CacheNamespace, *, contents: bool) -> Explained:
        """See ``EngineClient.explain``; the answer of the replica that has the most of the prompt."""
        replies = await self._ask(lambda replica: replica.explain(tokens, namespace, contents=contents))
        # Of replicas that have as much, one may know more of why it ends there.
        return max(replies.values(), key=lambda one: (one.n_cached, one.n_on_disk, one.reason != "never_seen"))

    async def match(self, prompts: Sequence[bytes], namespace: CacheNamespace) -> Matched:
        """See ``EngineClient.match``; for each prompt, what that replica has which has the most of it."""
        replies = await self._ask(lambda replica: replica.match(prompts, namespace))
        return best_match(list(replies.values()))

    async def stored(self, request: InFlightRequest) -> Stored:
        """See ``RequestSender.stored``."""
        return await self.runtimes[self._sent[request.id].number].stored(request)

    async def outline(self, *, contents: bool) -> Outlined:
        """See ``EngineClient.outline``; the trees of all replicas that are up."""
        replies = await self._ask(lambda replica: replica.outline(contents=contents))
        return joint_outline(replies, len(self.runtimes))

    async def tables(self, name: str = "", first: int = 0) -> Tabled:
        """See ``EngineClient.tables``; of one request in the replicas that have its prompts, else of all that are
        up."""
        if not name:
            return joint_tables(await self._ask(lambda replica: replica.tables()))
        having = [index for index, replica in enumerate(self.runtimes) if replica.has_request(name)]
        queries = (self.runtimes[index].tables(name, first) for index in having)
        tabled, errors = _parted(await asyncio.gather(*queries, return_exceptions=True))
        if not tabled:
            raise next(iter(errors.values()), None) or request_not_found(name)
        return joint_tables({having[index]: one for index, one in tabled.items()})

    async def pin(self, tokens: bytes, namespace: CacheNamespace, ttl_s: float) -> Pinned:
        """Pins what is cached of ``tokens`` where its pin is, or else in the replica that has the most of it.

        Ends a pin in all replicas.

        Args and errors are those of ``EngineClient.pin``.
        """
        if ttl_s:
            replies = await self._ask(lambda replica: replica.explain(tokens, namespace, contents=False))
            chosen = max(replies, key=lambda index: (replies[index].has_own_pin, _n_to_pin(replies[index])))
            return await self.runtimes[chosen].pin(tokens, namespace, ttl_s)
        pinned = await self._ask(lambda replica: replica.pin(tokens, namespace, ttl_s))
        return max(pinned.values(), key=lambda one: one.n_pinned)

    async def stats(self) -> Stats:
        """Returns the sums of the replicas that answer, and in ``Stats.replicas`` the most important of each."""
        stats = await self._ask(lambda replica: replica.stats())
        joint = self._stats.add(stats, [replica.n_restarts for replica in self.runtimes])
        replicas = {
            name: msgspec.structs.replace(one, placements_total=self._placement.n_placed(index))
            for index, (name, one) in enumerate(joint.replicas.items())
        }
        return msgspec.structs.replace(joint, replicas=replicas)

    def fail(self, error: RequestError) -> None:
        """Ends everything in flight with ``error``, which also refuses what comes later."""
        for replica in self.runtimes:
            replica.fail(error)

    async def close(self) -> None:
        """Fails everything in flight, then closes the connections."""
        for replica in self.runtimes:
            await replica.close()

    def _send(
        self,
        request: InFlightRequest,
        replicas: Mapping[int, RuntimeClient],
        found: Mapping[int, int],
        full: frozenset[int] = frozenset(),
        *,
        are_first: bool = True,
    ) -> None:
        """Sends a request to one of some replicas, by what those have of it that have said so."""
        number, request.load = self._placement.choose(request.prompt, replicas, found, was_refused=bool(full))
        replicas[number].send([request], are_first=are_first)
        self._sent[request.id] = _Sent(number, found, full)

    def _send_elsewhere(self, request: InFlightRequest) -> bool:
        """Sends a request that a full queue has refused to a replica that has not refused it, if there is one.

        The server has accepted it, so that it is answered also while the server refuses new ones to shut down.
        """
        sent = self._sent.get(request.id)
        if sent is None:
            return False
        try:
            accepting = self._accepting(are_first=False)
        except RequestError:
            return False
        full = sent.full | {sent.number}
        others = {number: replica for number, replica in accepting.items() if number not in full}
        if others:
            self._send(request, others, sent.found, full, are_first=False)
        return bool(others)

    def _accepting(self, *, are_first: bool = True) -> dict[int, RuntimeClient]:
        """Returns the replicas that take requests, by number, at least one. Raises their refusal if there is none.

        Those that have been silent for long are left out, unless all have.
        """
        refusals = [replica.refusal_of(are_first=are_first) for replica in self.runtimes]
        accepting = {index: one for index, one in enumerate(self.runtimes) if refusals[index] is None}
        if not accepting:
            raise _soonest([one for one in refusals if one is not None]).with_traceback(None)
        now_s = time.monotonic()
        heard = {index: one for index, one in accepting.items() if now_s - one.heard_at < SILENT_S}
        return heard or accepting

    async def _ask(self, query: Callable[[RuntimeClient], Coroutine[Any, Any, ReplyT]]) -> dict[int, ReplyT]:
        """Returns the replies of the replicas that answer, by number. Once one has, the others have a second left.

        Raises:
            RequestError: none answers.
        """
        tasks = {asyncio.create_task(query(replica)): index for index, replica in enumerate(self.runtimes)}
        waiting = set(tasks)
        answers: dict[int, ReplyT] = {}
        errors: list[RequestError] = []
        try:
            while waiting:
                limit_s = STRAGGLER_LIMIT_S if answers else None
                done, waiting = await asyncio.wait(waiting, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                for task in done:
                    try:
                        answers[tasks[task]] = task.result()
                    except RequestError as error:
                        errors.append(error)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        if not answers:
            raise _soonest(errors)
        return dict(sorted(answers.items()))

    async def _order(self, query: Callable[[RuntimeClient], Coroutine[Any, Any, ReplyT]]) -> list[ReplyT]:
        """Returns the replies of all replicas. One that is down and has no disk tier has nothing that could stay.

        Raises:
            RequestError: of a replica that has not obeyed; others may have.
        """
        replies, errors = _parted(await asyncio.gather(*map(query, self.runtimes), return_exceptions=True))
        for index, error in errors.items():
            is_empty = isinstance(error, RuntimeDied | RuntimeRestarting) and not self.runtimes[index].has_disk
            if not is_empty or not replies:
                raise error
        return list(replies.values())


def _n_to_pin(explained: Explained) -> int:
    """Returns how many tokens of a prompt a pin may cover, on the device and in the host tier."""
    return explained.n_cached + (0 if explained.is_loaded else explained.n_in_host)


def _parted(
    replies: Sequence[ReplyT | BaseException],
) -> tuple[dict[int, ReplyT], dict[int, RequestError]]:
    """Returns the replies and the errors, by the number of the replica. Raises what is no ``RequestError``."""
    answers: dict[int, ReplyT] = {}
    errors: dict[int, RequestError] = {}
    for index, reply in enumerate(replies):
        if isinstance(reply, RequestError):
            errors[index] = reply
        elif isinstance(reply, BaseException):
            raise reply
        else:
            answers[index] = reply
    return answers, errors


def _soonest(errors: Iterable[RequestError]) -> RequestError:
    """Returns the error of the replica that is ready first, or any if none is started again."""
    every = list(errors)
    restarting = [error for error in every if isinstance(error, RuntimeRestarting)]
    return min(restarting, key=lambda error: error.ready_at) if restarting else every[0]
