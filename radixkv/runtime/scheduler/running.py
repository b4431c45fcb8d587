"""The requests that have a slot and pages: how they get them, share them with their forks, and give them back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Phase, Request
from radixkv.runtime.scheduler.waiting import WaitingQueue

_HEADROOM_TOKENS = 16
"""Room that an admission leaves for each running row, so that no retraction follows it at once."""
_HEADROOM_DIVISOR = 24
"""It leaves no more than one in so many of the pool's pages: where many short sequences run, they end as fast as
they grow."""


class RunningRequests:
    """Requests that go on, in the order of their admission, and those that *drain*: they have ended or been
    retracted, and keep slot and pages until no step that is launched, or that copies their tail, uses them."""

    def __init__(self, cache: PageCache, waiting: WaitingQueue, n_batch_slots: int) -> None:
        self._cache = cache
        self._waiting = waiting
        self._n_batch_slots = n_batch_slots
        self._free_batch_slots = list(range(n_batch_slots - 1, -1, -1))
        self._active: dict[Request, None] = {}
        self._retrying: dict[Request, None] = {}
        self._draining: dict[Request, None] = {}
        self._max_headroom_pages = -(-cache.n_pages // _HEADROOM_DIVISOR)

    def __len__(self) -> int:
        return len(self._active)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._active))

    @property
    def releasing(self) -> tuple[Request, ...]:
        """Those that do not go on. O(draining)."""
        return tuple(self._draining)

    @property
    def is_releasing(self) -> bool:
        """Whether pages will come back. O(1)."""
        return bool(self._draining)

    @property
    def has_batch_slot(self) -> bool:
        """Whether another request can be opened."""
        return bool(self._free_batch_slots)

    @property
    def has_retries(self) -> bool:
        """Whether some that go on are retried after a failed step. O(1)."""
        return bool(self._retrying)

    def can_join_retry(self, request: Request) -> bool:
        """Whether this one may be retried together with those that are. O(trials)."""
        together = (*self._retrying, request)
        return all(one.max_retry_rows is not None and len(together) <= one.max_retry_rows for one in together)

    def prompts(self) -> list[Request]:
        """Those that go on and have more to compute than the token that was sampled last. O(running)."""
        return [one for one in self._active if one.n_scheduled < one.n_known and not one.is_decoding]

    def block_tables(self) -> list[BlockTable]:
        """Every open blocks. O(running)."""
        return [request.blocks for request in (*self._active, *self._draining)]

    def open(self, request: Request, prompts: Iterable[Request]) -> bool:
        """A slot and a lease for a waiting request, if there is room for all tokens that it has, beside what the
        ``prompts`` before it have yet to get, and for the running rows to grow. Also after a retraction no more is
        asked for: ``max_tokens`` says little of how long an answer will be, and all that wait would wait with it.
        O(prompts), and ``PageCache.open``."""
        blocks = self._cache.open(request.namespace, request.key, request.reads_cache, request.bypasses_tree)
        n_missing = self._cache.pages_for(request.n_known) - blocks.n_leased
        if not self._has_room(self._promised(request, prompts) + n_missing):
            self._cache.close(blocks)
            return False
        self._assign(request, blocks)
        return True

    def start(self, request: Request) -> None:
        """An opened request goes on."""
        request.phase = Phase.RUNNING
        self._active[request] = None
        if request.max_retry_rows is not None:
            self._retrying[request] = None

    def end_retry(self, request: Request) -> None:
        """It was retried, and all went well."""
        request.max_retry_rows = None
        self._retrying.pop(request, None)

    def close(self, request: Request) -> None:
        """Takes slot and pages back; no step may still use them."""
        self.end_copies(request)
        self._cache.close(request.blocks)
        request.block_table = None
        self._free_batch_slots.append(request.batch_slot)
        request.batch_slot = -1
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

    def end_copies(self, fork: Request) -> None:
        """The first row of a fork is done, or will not be: its leader's tail need not be kept for it."""
        if fork.leader is not None:
            fork.leader.n_pending_copies -= 1
            fork.leader = None

    def end(self, request: Request) -> None:
        """A request that runs or drains is over."""
        self._stop(request)
        request.phase = Phase.ENDED
        self._draining[request] = None

    def requeue(self, request: Request, *, discards_results: bool = True) -> None:
        """A request that runs or drains goes back to the queue; ``discards_results`` what its launched rows give."""
        self._stop(request)
        request.phase = Phase.RETRACTED
        request.discards_results |= discards_results
        self._draining[request] = None

    def release(self) -> None:
        """Takes back the pages of draining requests that no step uses. O(draining)."""
        while done := [r for r in self._draining if not (r.n_in_flight or r.n_pending_copies)]:
            for request in done:  # a fork that goes lets its leader go
                del self._draining[request]
                self.close(request)
                request.discards_results = False
                if request.phase is Phase.RETRACTED:
                    request.phase = Phase.WAITING
                    self._waiting.add(request)

    def _promised(self, request: Request, prompts: Iterable[Request]) -> int:
        """Pages that those of the prompts that go before it have yet to get."""
        first = (one for one in prompts if one.order < request.order)
        return sum(self._cache.pages_for(one.n_known) - len(one.blocks.pages) for one in first)

    def _stop(self, request: Request) -> None:
        self._active.pop(request, None)
        self._retrying.pop(request, None)

    def _can_fork(self, leader: Request, n_promised: int) -> bool:
        """Whether there is room beside what older prompts have yet to get. O(1)."""
        n_pages = self._cache.pages_for(leader.n_prompt) - leader.blocks.n_leased
        return (
            leader.phase is Phase.RUNNING
            and self.has_batch_slot
            and leader.max_retry_rows is None
            and self._has_room(n_promised + n_pages)
        )

    def _fork(self, leader: Request, follower: Request) -> None:
        n_tokens = follower.n_prompt - 1
        blocks = self._cache.fork(leader.blocks, n_tokens, self._cache.pages_for(follower.n_prompt))
        self._assign(follower, blocks)
        self.start(follower)
        follower.n_scheduled = n_tokens
        if blocks.copies:
            follower.leader = leader
            leader.n_pending_copies += 1

    def _assign(self, request: Request, blocks: BlockTable) -> None:
        request.block_table = blocks
        request.batch_slot = self._free_batch_slots.pop()
        request.needs_history = request.sampling.has_penalties

    def _has_room(self, n_pages: int) -> bool:
        """Whether there are so many pages, and some for the running rows to grow. O(1)."""
        n_headroom = min(self._cache.pages_for(_HEADROOM_TOKENS * len(self._active)), self._max_headroom_pages)
        return n_pages + n_headroom <= self._cache.n_available
