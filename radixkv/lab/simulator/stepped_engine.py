"""A page pool and its scheduler, which take the prompts of a replay and run its steps one by one."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

from radixkv.lab.simulator.answers import END, Answers
from radixkv.lab.simulator.caches import CacheSettings, ReplayCaches
from radixkv.lab.simulator.server_policies import KNOWS_NOTHING, ServerPolicies
from radixkv.lab.simulator.traffic import Traffic
from radixkv.lab.simulator.virtual_time import VirtualTime
from radixkv.runtime.assemble import open_scheduler
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.protocols.request import Observer
from radixkv.runtime.protocols.returns import Returns
from radixkv.runtime.protocols.states import States
from radixkv.runtime.reporting.cache_commands import match_tiers
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler.scheduler import SchedulerLimits
from radixkv.runtime.states.recurrent_states import RecurrentStates
from radixkv.runtime.step.plan import Row, StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.tree.node import TOKEN_BYTES, Namespace
from radixkv.wire.cache_messages import Matched
from radixkv.wire.cache_use import CacheUse
from radixkv.wire.namespace import CacheNamespace

_LOOKAHEAD = 1
"""Steps launched before the result of the oldest one is taken, as in the server's loop."""


class Stepped(NamedTuple):
    """What a call of ``SteppedEngine.step`` has done."""

    is_idle: bool
    """Whether no step was launched or completed."""
    went_on: Sequence[int] = ()
    """Indices of the prompts whose answers got a token."""
    ended: Sequence[tuple[int, CacheUse]] = ()
    """For each prompt whose answer is complete: its index, and what the caches gave it."""


class EngineCounts(NamedTuple):
    """What a ``SteppedEngine`` counts."""

    n_preemptions: int
    n_recomputed_tokens: int
    """Tokens that preempted requests have computed again."""
    n_pages_loaded_ahead: int | None
    """Pages that were loaded before the turn of their request; None without a host tier."""
    n_pages_loaded_ahead_used: int | None
    """How many of these a request has used for which they were loaded."""


def likely_states(cache: PageCache) -> States:
    """Returns what keeps states as the server does, of prompts in which no token ends a message."""
    return RecurrentStates.at_likely_places(cache, frozenset())


class SteppedEngine:
    """A page pool and its scheduler. It is a ``Replica`` that ``Placement`` may choose.

    Args:
        traffic: the prompts, under the rule ``engine``.
        settings: of the caches.
        limits: of the scheduler.
        answers: the prompts' answers; None: each request ends with its first token.
        make_states: makes what keeps the states of recurrent layers, if the cache has some.
        policies: of admission and of loads ahead.
        open_returns: makes what knows which conversations are expected back; None: nobody does.
        time: the virtual time that steps and copies take; None: they take none.

    Raises:
        ConfigError: there is a disk tier without a host tier.
    """

    empty_since = 0.0
    """The cache is not emptied before the end."""

    def __init__(
        self,
        traffic: Traffic,
        settings: CacheSettings,
        limits: SchedulerLimits,
        answers: Answers | None,
        make_states: Callable[[PageCache], States] = likely_states,
        *,
        policies: ServerPolicies = KNOWS_NOTHING,
        open_returns: Callable[[PageCache], Returns] | None = None,
        time: VirtualTime | None = None,
    ) -> None:
        self._traffic = traffic
        self._time = time
        self._caches = ReplayCaches(traffic, settings, time)
        self.cache = self._caches.device
        self._scheduler = open_scheduler(
            self.cache,
            limits,
            admission="reserved" if policies.admission == "reserved" else "expected",
            host_tier=self._caches.host_tier,
            loads_ahead=policies.loads_ahead,
            states=None if settings.n_states is None else make_states(self.cache),
            returns=None if open_returns is None else open_returns(self.cache),
            clock=monotonic if time is None else time.clock,
        )
        self.namespace = Namespace()
        """That of all prompts."""
        self._launched: deque[StepPlan] = deque()
        self._answers = answers
        self._are_limited = answers is None or answers.are_limited or policies.admission == "known"
        """Whether ``max_tokens`` ends answers, and not their last token."""
        self._in_flight: dict[Request, int] = {}
        """Prompt index of each request in flight."""
        self._loads: dict[Request, float] = {}
        """What each request in flight adds to ``load``."""
        self._answer_of: dict[Request, array[int]] = {}
        """The answer of each request in flight."""

    @property
    def n_in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._in_flight)

    @property
    def load(self) -> float:
        """See ``Replica``. O(requests in flight)."""
        return sum(self._loads.values())

    async def match(self, prompts: Sequence[bytes], namespace: CacheNamespace) -> Matched:
        """See ``Replica``. O(edges) a prompt, and with a disk tier O(tokens)."""
        matches = tuple(match_tiers(self._scheduler, self.namespace, tokens) for tokens in prompts)
        return Matched("", matches, self.n_in_flight, 0, None, None)

    def send(
        self,
        index: int,
        load: float = 1.0,
        *,
        received_at: float = 0.0,
        follow: Callable[[Request], Observer] | None = None,
    ) -> None:
        """Adds a prompt, which fits the pool.

        Args:
            index: of the prompt.
            load: what it adds to ``load``.
            received_at: when it arrived, in virtual time.
            follow: makes what observes the request; None: nothing does.
        """
        symbols = self._traffic.symbols(index)
        n_prompt = len(symbols) // TOKEN_BYTES
        answer = array("i", bytes(TOKEN_BYTES) if self._answers is None else self._answers.symbols(index))
        n_room = max(1, self.cache.n_pages * self.cache.page_size - n_prompt)
        request = Request(
            id=str(index),
            namespace=self.namespace,
            known_key=bytearray(symbols),
            n_prompt=n_prompt,
            max_tokens=min(len(answer), n_room) if self._are_limited else n_room,
            stop_token_ids=frozenset() if self._are_limited else frozenset([END]),
            received_at=received_at,
        )
        if follow is not None:
            request.observers = (follow(request),)
        self._in_flight[request] = index
        self._loads[request] = load
        self._answer_of[request] = answer
        self._scheduler.add(request)

    def step(self) -> Stepped:
        """Launches a step and completes the one before."""
        plan = self._scheduler.schedule()
        if plan is not None:
            self._launched.append(plan)
        if len(self._launched) <= _LOOKAHEAD and (plan is not None or not self._launched):
            return Stepped(is_idle=plan is None)
        oldest = self._launched.popleft()
        if self._time is not None:
            self._scheduler.forecast.record(oldest, self._time.take(oldest))
        requests = self._scheduler.launched_plans[0].requests
        tokens = [self._next_token(row, request) for row, request in zip(oldest.rows, requests, strict=True)]
        updates = self._scheduler.complete(oldest, StepResult(tuple(tokens), (True,) * len(tokens)))
        went_on = [self._in_flight[one.request] for one in updates if one.tokens]
        ended = [self._end(one.request) for one in updates if one.finish_reason is not None]
        return Stepped(False, went_on, ended)

    def counts(self) -> EngineCounts:
        """Returns what has been counted since the start. O(1)."""
        host, *_ = self._scheduler.tiers.stats()
        return EngineCounts(
            n_preemptions=self._scheduler.n_preemptions,
            n_recomputed_tokens=self._scheduler.n_recomputed_tokens,
            n_pages_loaded_ahead=None if host is None else host.pages_loaded_ahead_total,
            n_pages_loaded_ahead_used=None if host is None else host.pages_loaded_ahead_used_by_waiting_total,
        )

    def check(self) -> None:
        """Raises ``InvariantError`` if the scheduler's books are wrong. O(pages)."""
        self._scheduler.check()

    def flush(self) -> None:
        """Empties the caches, which frees their memory. No request may be in flight. O(pages)."""
        self._caches.flush()

    def _end(self, request: Request) -> tuple[int, CacheUse]:
        index = self._in_flight.pop(request)
        del self._answer_of[request], self._loads[request]
        self._scheduler.tiers.ended((request,))
        for observer in request.observers:
            observer.ended([request], is_prompt_computed=True)
        return index, self._caches.cache_use(index, request)

    def _next_token(self, row: Row, request: Request) -> int:
        """Returns the token that a row samples; -1 if it samples none, or after the end of its answer."""
        answer = self._answer_of.get(request)
        place = len(request.known_key) // TOKEN_BYTES - request.n_prompt
        if row.sampling is None or answer is None or place >= len(answer):
            return -1
        return answer[place] if self._are_limited or place + 1 < len(answer) else END
