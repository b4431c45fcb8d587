"""The requests that have a slot and pages: how they get them, share them with their forks, and give them back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from radixkv.runtime.cache.block_table import Holding
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Phase, Request, held
from radixkv.runtime.scheduler.waiting import WaitingQueue

_GROWTH_TOKENS = 16
"""Room that an admission leaves for each running row, so that no retraction follows it at once."""
_GROWTH_PARTS = 24
"""It leaves no more than one in so many of the pool's pages: where many short sequences run, they end as fast as
they grow."""


class RunningRequests:
    """Requests that go on, in the order of their admission, and those that *drain*: they have ended or been
    retracted, and keep slot and pages until no step that is launched, or that copies their tail, uses them."""

    def __init__(self, cache: PageCache, waiting: WaitingQueue, n_slots: int) -> None:
        self._cache = cache
        self._waiting = waiting
        self._n_slots = n_slots
        self._free_slots = list(range(n_slots - 1, -1, -1))
        self._going: dict[Request, None] = {}
        self._on_trial: dict[Request, None] = {}
        self._draining: dict[Request, None] = {}
        self._most_growth = -(-cache.n_pages // _GROWTH_PARTS)

    def __len__(self) -> int:
        return len(self._going)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._going))

    @property
    def draining(self) -> tuple[Request, ...]:
        """Those that do not go on. O(draining)."""
        return tuple(self._draining)

    @property
    def is_draining(self) -> bool:
        """Whether pages will come back. O(1)."""
        return bool(self._draining)

    @property
    def has_slot(self) -> bool:
        """Whether another request can be opened."""
        return bool(self._free_slots)

    @property
    def has_trials(self) -> bool:
        """Whether some that go on are retried after a failed step. O(1)."""
        return bool(self._on_trial)

    def takes_trial(self, request: Request) -> bool:
        """Whether this one may be retried together with those that are. O(trials)."""
        together = (*self._on_trial, request)
        return all(one.trial_rows is not None and len(together) <= one.trial_rows for one in together)

    def prompts(self) -> list[Request]:
        """Those that go on and have more to compute than the token that was sampled last. O(running)."""
        return [one for one in self._going if one.n_scheduled < one.n_known and not one.is_decoding]

    def holdings(self) -> list[Holding]:
        """Every open holding. O(running)."""
        return [held(request) for request in (*self._going, *self._draining)]

    def open(self, request: Request, prompts: Iterable[Request]) -> bool:
        """A slot and a lease for a waiting request, if there is room for all tokens that it has, beside what the
        ``prompts`` before it have yet to get, and for the running rows to grow. Also after a retraction no more is
        asked for: ``max_tokens`` says little of how long an answer will be, and all that wait would wait with it.
        O(prompts), and ``PageCache.open``."""
        holding = self._cache.open(request.namespace, request.key, request.reads_cache, request.private)
        n_missing = self._cache.pages_for(request.n_known) - holding.n_leased
        if not self._has_room(self._promised(request, prompts) + n_missing):
            self._cache.close(holding)
            return False
        self._seat(request, holding)
        return True

    def start(self, request: Request) -> None:
        """An opened request goes on."""
        request.phase = Phase.RUNNING
        self._going[request] = None
        if request.trial_rows is not None:
            self._on_trial[request] = None

    def acquit(self, request: Request) -> None:
        """It was retried, and all went well."""
        request.trial_rows = None
        self._on_trial.pop(request, None)

    def close(self, request: Request) -> None:
        """Takes slot and pages back; no step may still use them."""
        self.end_copy(request)
        self._cache.close(held(request))
        request.holding = None
        self._free_slots.append(request.slot)
        request.slot = -1
        request.n_scheduled = 0

    def fork(self, leader: Request) -> None:
        """The leader's first token is known: its followers share its pages, and compute no more than the prompt's
        last token. Those for whom there is no slot or room wait in the queue, and find what the tree has then.
        O(running), and ``PageCache.fork`` a follower."""
        n_promised = self._promised(leader, self.prompts())
        for follower in leader.followers:
            follower.scheduled_at = leader.scheduled_at
            follower.leader = None
            follower.reads_cache = True
            if self._can_fork(leader, n_promised):
                self._fork(leader, follower)
            else:
                follower.phase = Phase.WAITING
                self._waiting.add(follower)
        leader.followers = []

    def end_copy(self, fork: Request) -> None:
        """The first row of a fork is done, or will not be: its leader's tail need not be kept for it."""
        if fork.leader is not None:
            fork.leader.n_borrowers -= 1
            fork.leader = None

    def end(self, request: Request) -> None:
        """A request that runs or drains is over."""
        self._stop(request)
        request.phase = Phase.ENDED
        self._draining[request] = None

    def requeue(self, request: Request, *, discards: bool = True) -> None:
        """A request that runs or drains goes back to the queue; ``discards`` what its launched rows give."""
        self._stop(request)
        request.phase = Phase.RETURNING
        request.discards |= discards
        self._draining[request] = None

    def drain(self) -> None:
        """Takes back the pages of draining requests that no step uses. O(draining)."""
        while done := [r for r in self._draining if not (r.n_in_flight or r.n_borrowers)]:
            for request in done:  # a fork that goes lets its leader go
                del self._draining[request]
                self.close(request)
                request.discards = False
                if request.phase is Phase.RETURNING:
                    request.phase = Phase.WAITING
                    self._waiting.add(request)

    def _promised(self, request: Request, prompts: Iterable[Request]) -> int:
        """Pages that those of the prompts that go before it have yet to get."""
        first = (one for one in prompts if one.order < request.order)
        return sum(self._cache.pages_for(one.n_known) - len(held(one).table) for one in first)

    def _stop(self, request: Request) -> None:
        self._going.pop(request, None)
        self._on_trial.pop(request, None)

    def _can_fork(self, leader: Request, n_promised: int) -> bool:
        """Whether there is room beside what older prompts have yet to get. O(1)."""
        n_pages = self._cache.pages_for(leader.n_prompt) - held(leader).n_leased
        return (
            leader.phase is Phase.RUNNING
            and self.has_slot
            and leader.trial_rows is None
            and self._has_room(n_promised + n_pages)
        )

    def _fork(self, leader: Request, follower: Request) -> None:
        n_tokens = follower.n_prompt - 1
        holding = self._cache.fork(held(leader), n_tokens, self._cache.pages_for(follower.n_prompt))
        self._seat(follower, holding)
        self.start(follower)
        follower.n_scheduled = n_tokens
        if holding.copies:
            follower.leader = leader
            leader.n_borrowers += 1

    def _seat(self, request: Request, holding: Holding) -> None:
        request.holding = holding
        request.slot = self._free_slots.pop()
        request.needs_history = request.sampling.has_penalties

    def _has_room(self, n_pages: int) -> bool:
        """Whether there are so many pages, and some for the running rows to grow. O(1)."""
        n_growth = min(self._cache.pages_for(_GROWTH_TOKENS * len(self._going)), self._most_growth)
        return n_pages + n_growth <= self._cache.n_available
