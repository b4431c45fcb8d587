"""A replay of requests at their times on the production scheduler, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from radixkv.errors import InvariantError
from radixkv.lab.simulator.answers import Answers
from radixkv.lab.simulator.arrivals import Arrivals
from radixkv.lab.simulator.caches import CacheSettings, ReplayResult
from radixkv.lab.simulator.concurrent_replay import (
    MAX_NUM_BATCHED_TOKENS,
    check_concurrent_replay,
    enough_pages,
    scheduler_limits,
)
from radixkv.lab.simulator.known_returns import KnownReturns
from radixkv.lab.simulator.server_policies import ServerPolicies
from radixkv.lab.simulator.step_time import H200_8B, StepTime
from radixkv.lab.simulator.stepped_engine import EngineCounts, SteppedEngine
from radixkv.lab.simulator.traffic import Traffic
from radixkv.lab.simulator.turns import Turn
from radixkv.lab.simulator.virtual_time import Clock, VirtualTime
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.pauses.pauses import Pauses
from radixkv.runtime.pauses.pauses import Turn as FollowedTurn
from radixkv.runtime.protocols.returns import Returns
from radixkv.runtime.request import Request
from radixkv.settings.config import SchedulerConfig
from radixkv.terminal import Progress
from radixkv.wire.cache_messages import BeginPause
from radixkv.wire.cache_use import CacheUse
from radixkv.wire.messages import Submit
from radixkv.wire.sampling import SamplingParams

_TURN_S = 1e-4
"""How long a turn of the loop lasts that finds nothing to do, though requests wait."""
_MAX_IDLE_TURNS = 100_000


class TimedTraffic(NamedTuple):
    """What arrives."""

    prompts: Traffic
    """Under the rule ``engine``; each symbol is one token."""
    answers: Answers
    turns: Sequence[Turn | None]
    """The turn before each request."""
    calls: Sequence[Sequence[str]]
    """Names of the tools that each answer calls; none: a user is to go on."""
    arrivals: Arrivals


class Server(NamedTuple):
    """How fast a server is, and what it computes at most in a step."""

    steps: StepTime = H200_8B
    kv_bytes_per_token: int = 131_072
    """By which copies are limited. The default is that of Llama 3 8B in 16 bits."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS


class Seen(NamedTuple):
    """What was seen of a request."""

    prompt: int
    """Its index."""
    ttft_s: float
    """From its arrival to its first token."""
    stall_s: float
    """The longest time between two tokens of its answer; 0 with one token."""
    n_cached: int
    is_return: bool
    """Whether it goes on from an earlier request."""
    was_on_device: bool
    """Whether the device had all that it shares with that request's prompt when it arrived, but for a page."""


class TimedResult(NamedTuple):
    """The counts of a replay in virtual time."""

    replay: ReplayResult
    counts: EngineCounts
    seen: Sequence[Seen]
    """Of each request that was served, in the order of their ends."""
    seconds: float
    """When the last answer ended."""


class TimedReplay:
    """A page pool and its scheduler in virtual time.

    Steps take what ``StepTime`` says, and copies between tiers what the costs say, one after another. The next step
    is planned while one is computed, as in the server.

    Args:
        traffic: what arrives.
        settings: of the caches; not with the policy ``oracle``, because the order of requests is not known before.
        policies: those of the server that are to be compared.
        server: its speed and its limits.

    Raises:
        ConfigError: see ``check_concurrent_replay``; or there is a disk tier without a host tier.
    """

    def __init__(
        self, traffic: TimedTraffic, settings: CacheSettings, policies: ServerPolicies, server: Server
    ) -> None:
        prompts = traffic.prompts
        check_concurrent_replay(prompts, server.max_num_batched_tokens)
        self._traffic = traffic
        self._policies = policies
        self._clock = Clock()
        self._pauses: Pauses | None = None
        self._known: KnownReturns | None = None
        limits = scheduler_limits(
            prompts,
            server.max_num_seqs,
            server.max_num_batched_tokens,
            max_queued_requests=len(prompts.n_tokens),
            target_itl_ms=SchedulerConfig.target_itl_ms,
        )
        enough = enough_pages(prompts, traffic.answers, server.max_num_seqs)
        self.engine = SteppedEngine(
            prompts,
            settings.limited(enough),
            limits,
            traffic.answers,
            policies=policies,
            open_returns=self._open_returns,
            time=VirtualTime(self._clock, server.steps, server.kv_bytes_per_token * prompts.page_size),
        )
        self._heap: list[tuple[float, int]] = list(traffic.arrivals.first())
        heapify(self._heap)
        self._received: dict[int, tuple[float, bool]] = {}
        """When each request in flight arrived, and whether the device had what it was to find."""
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        """When each request in flight got its first and its last token."""
        self._stall: dict[int, float] = {}
        self._cached = [0] * len(prompts.n_tokens)
        self._seen: list[Seen] = []
        self._n_too_large = 0

    def run(self, progress: Progress | None = None) -> TimedResult:
        """Replays all requests and flushes the pool. About 10 µs a row of a step, and 0.2 ms a step.

        Args:
            progress: shows how many requests are served.
        """
        engine, clock = self.engine, self._clock
        use, max_cached_pages, n_idle = CacheUse(), 0, 0
        while self._heap or engine.n_in_flight:
            self._send()
            stepped = engine.step()
            for index in stepped.went_on:
                if index in self._last:
                    self._stall[index] = max(self._stall[index], clock.now - self._last[index])
                else:
                    self._first[index], self._stall[index] = clock.now, 0.0
                self._last[index] = clock.now
            for index, of_one in stepped.ended:
                use += of_one
                self._end(index, of_one)
            if progress is not None and stepped.ended:
                progress.show(f"{len(self._seen)}/{len(self._cached)} requests")
            max_cached_pages = max(max_cached_pages, engine.cache.tree.n_pages_reachable)
            n_idle = n_idle + 1 if stepped.is_idle else 0
            if n_idle > _MAX_IDLE_TURNS:
                raise InvariantError(f"{engine.n_in_flight} requests wait, and nothing is computed or copied")
            if stepped.is_idle:
                self._wait()
        seconds = clock.now
        engine.check()
        counts = engine.counts()
        engine.flush()
        n_evicted = engine.cache.n_evicted
        replay = ReplayResult(self._cached, use, self._n_too_large, n_evicted, max_cached_pages)
        return TimedResult(replay, counts, self._seen, seconds)

    def _open_returns(self, cache: PageCache) -> Returns:
        if self._policies.pauses == "none":
            return Returns()
        if self._policies.pauses == "known":
            self._known = KnownReturns()
            return self._known
        self._pauses = Pauses(cache, self._clock)
        return self._pauses

    def _send(self) -> None:
        """Sends what has arrived."""
        prompts, engine = self._traffic.prompts, self.engine
        while self._heap and self._heap[0][0] <= self._clock.now:
            at, index = heappop(self._heap)
            if self._known is not None:
                self._known.take(index)
            if prompts.n_tokens[index] > engine.cache.n_pages * engine.cache.page_size:
                self._n_too_large += 1
                self._go_on(index, at)
                continue
            turn = self._traffic.turns[index]
            is_on_device = False
            if turn is not None:
                (n_found,) = engine.cache.matches([(engine.namespace, prompts.symbols(index))])
                is_on_device = n_found + engine.cache.page_size > turn.n_shared
            self._received[index] = at, is_on_device
            follow = None
            if self._pauses is not None:
                follow = partial(self._follow, self._pauses, "" if turn is None else str(turn.before))
            engine.send(index, received_at=at, follow=follow)

    def _follow(self, pauses: Pauses, resumes: str, request: Request) -> FollowedTurn:
        return pauses.follow(Submit(request.id, b"", SamplingParams(), may_pause=True, resumes=resumes), [request])

    def _end(self, index: int, use: CacheUse) -> None:
        """Takes note that an answer has ended, and of when its conversation goes on."""
        at, is_on_device = self._received.pop(index)
        turn = self._traffic.turns[index]
        self._cached[index] = use.n_cached
        first, stall_s = self._first.pop(index), self._stall.pop(index)
        del self._last[index]
        self._seen.append(Seen(index, first - at, stall_s, use.n_cached, turn is not None, is_on_device))
        if self._pauses is not None:
            self._pauses.begin(BeginPause("", str(index), tuple(self._traffic.calls[index])))
        self._go_on(index, self._clock.now)

    def _go_on(self, index: int, now: float) -> None:
        for due, following in self._traffic.arrivals.after(index, now):
            heappush(self._heap, (due, following))
            if self._known is not None:
                self._known.add(following, self.engine.namespace, self._traffic.prompts.symbols(following), due)

    def _wait(self) -> None:
        """Lets time pass until a request arrives or a copy ends."""
        times = [self._heap[0][0]] if self._heap else []
        if (end := self._clock.next_end()) is not None:
            times.append(end)
        self._clock.now = max(self._clock.now, min(times, default=self._clock.now + _TURN_S))
