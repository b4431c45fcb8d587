"""A page pool and its scheduler, which take the prompts of a replay and run its steps one by one."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence

from radixkv.lab.simulator.answers import Answers
from radixkv.lab.simulator.caches import CacheSettings, ReplayCaches
from radixkv.lab.simulator.traffic import Traffic
from radixkv.runtime.assemble import open_scheduler
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.protocols import States
from radixkv.runtime.reporting.cache_commands import match_tiers
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler.scheduler import SchedulerLimits
from radixkv.runtime.step.plan import Row, StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.tree.node import TOKEN_BYTES, Namespace
from radixkv.wire.cache_messages import Matched
from radixkv.wire.cache_use import CacheUse

_LOOKAHEAD = 1
"""Steps launched before the result of the oldest one is taken, as in the server's loop."""


class SteppedEngine:
    """A page pool and its scheduler. It is a ``Replica`` that ``Placement`` may choose.

    Args:
        traffic: the prompts, under the rule ``engine``.
        settings: of the caches.
        limits: of the scheduler.
        answers: the prompts' answers; None: each request ends with its first token.
        make_states: makes what keeps the states of recurrent layers; None: there are no such layers.

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
        make_states: Callable[[PageCache], States] | None = None,
    ) -> None:
        self._traffic = traffic
        self._caches = ReplayCaches(traffic, settings)
        self.cache = self._caches.device
        states = None if make_states is None else make_states(self.cache)
        self._scheduler = open_scheduler(self.cache, limits, host_tier=self._caches.host_tier, states=states)
        self._namespace = Namespace()
        self._launched: deque[StepPlan] = deque()
        self._answers = answers
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

    async def match(self, prompts: Sequence[bytes], cache_salt: str, *, tenant: str) -> Matched:
        """See ``Replica``. O(edges) a prompt, and with a disk tier O(tokens)."""
        matches = tuple(match_tiers(self._scheduler, self._namespace, tokens) for tokens in prompts)
        return Matched("", matches, self.n_in_flight, 0, None, None)

    def send(self, index: int, load: float) -> None:
        """Adds a prompt, which fits the pool, and what it adds to ``load``."""
        symbols = self._traffic.symbols(index)
        n_prompt = len(symbols) // TOKEN_BYTES
        answer = array("i", bytes(TOKEN_BYTES) if self._answers is None else self._answers.symbols(index))
        n_room = self.cache.n_pages * self.cache.page_size - n_prompt
        request = Request(
            id=str(index),
            namespace=self._namespace,
            tokens=bytearray(symbols),
            n_prompt=n_prompt,
            max_tokens=max(1, min(len(answer), n_room)),
        )
        self._in_flight[request] = index
        self._loads[request] = load
        self._answer_of[request] = answer
        self._scheduler.add(request)

    def step(self) -> list[tuple[int, CacheUse]]:
        """Launches a step and completes the one before.

        Returns:
            For each prompt whose answer is complete: its index, and what the caches gave it.
        """
        plan = self._scheduler.schedule()
        if plan is not None:
            self._launched.append(plan)
        if len(self._launched) <= _LOOKAHEAD and (plan is not None or not self._launched):
            return []
        oldest = self._launched.popleft()
        requests = self._scheduler.launched_plans[0].requests
        tokens = [self._next_token(row, request) for row, request in zip(oldest.rows, requests, strict=True)]
        updates = self._scheduler.complete(oldest, StepResult(tuple(tokens), (True,) * len(tokens)))
        return [self._end(update.request) for update in updates if update.finish_reason is not None]

    def flush(self) -> None:
        """Empties the caches, which frees their memory. No request may be in flight. O(pages)."""
        self._caches.flush()

    def _end(self, request: Request) -> tuple[int, CacheUse]:
        index = self._in_flight.pop(request)
        del self._answer_of[request], self._loads[request]
        self._scheduler.tiers.ended((request,))
        return index, self._caches.cache_use(index, request)

    def _next_token(self, row: Row, request: Request) -> int:
        """Returns the token that a row samples; -1 if it samples none, or after the end of its answer."""
        answer = self._answer_of.get(request)
        place = len(request.tokens) // TOKEN_BYTES - request.n_prompt
        return -1 if row.sampling is None or answer is None or place >= len(answer) else answer[place]
