"""The engine's own scheduler, page cache and tree, with nothing behind them that computes."""

from __future__ import annotations

from itertools import count
from time import thread_time

from msgspec.structs import replace

from radixkv.config import SchedulerConfig
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import GREEDY, Phase, Request
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.step.plan import Row, StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.studies.paging.memory import Memory
from radixkv.studies.paging.sequences import Sequence, Turn, n_distinct
from radixkv.tree.node import Namespace


class Paged:
    """A scheme that hands out pages one by one, shares them by prefix, and takes them back from whom it must.

    Rows and tokens of a step are not limited, so that memory alone decides who runs.

    Args:
        n_slots: the pool; what does not fill a page is left out.
        page_size: tokens a page.
    """

    def __init__(self, n_slots: int, page_size: int) -> None:
        self.cache = PageCache(n_slots // page_size, page_size)
        config = SchedulerConfig(
            max_num_seqs=n_slots,
            max_num_batched_tokens=2 * n_slots,
            schedule_policy="fcfs",
            max_queued_requests=1 << 31,
        )
        self._scheduler = Scheduler(self.cache, config)
        self._ids = (str(number) for number in count())
        self._sequences: list[Sequence] = []
        """By the seed of their rows."""
        self._plan: StepPlan | None = None
        self.seconds = 0.0
        """Processor time of scheduling, cache and tree."""

    @property
    def n_waiting(self) -> int:
        """Sequences that have not begun, or were retracted; choices that wait for their prompt are none of them."""
        return len(self._scheduler.waiting)

    @property
    def n_retractions(self) -> int:
        """How often a sequence had to give its memory back before its end, and to begin again."""
        return self._scheduler.n_preemptions

    def add(self, turn: Turn) -> None:
        """Queues the sequences as the choices of one request."""
        request_id = next(self._ids)
        leader, *followers = [self._request(request_id, sequence) for sequence in turn.sequences]
        self._scheduler.add(leader, followers)

    def begin(self) -> None:
        """The scheduler's next plan."""
        begun = thread_time()
        self._plan = self._scheduler.schedule()
        self.seconds += thread_time() - begun

    def running(self) -> list[Sequence]:
        """In the order of their begin; then those that had to give way to others in this step, of which they have a
        row, which may be their last."""
        running = self._scheduler.running
        giving_way = [one for one in running.releasing if one.phase is Phase.RETRACTED and one.n_in_flight]
        return [self._sequence(request) for request in (*running, *giving_way)]

    def memory(self) -> Memory:
        """O(running). Pages are all alike, so a free one is never in the wrong place: nothing is external.

        Those that drain keep their pages for this step, because a fork copies from them.
        """
        cache, page_size = self.cache, self.cache.page_size
        occupied = cache.tree.n_pages_leased * page_size
        reserved = entries = 0
        stored: list[tuple[Sequence, int]] = []
        running = self._scheduler.running
        for request in (*running, *running.releasing):
            blocks, sequence = request.blocks, self._sequence(request)
            occupied += request.n_scheduled - blocks.n_leased * page_size
            entries += len(blocks.pages)
            stored.append((sequence, request.n_scheduled))
            if request.phase is Phase.RUNNING:
                n_empty = len(blocks.pages) * page_size - request.n_scheduled
                reserved += min(n_empty, sequence.n_stored - request.n_scheduled)
        return Memory(
            occupied=occupied,
            reserved=reserved,
            internal=(cache.n_pages - cache.n_available) * page_size - occupied - reserved,
            external=0,
            free=cache.n_free * page_size,
            cached=cache.tree.n_pages_evictable * page_size,
            duplicate=occupied - n_distinct(stored),
            stored=sum(n_tokens for _, n_tokens in stored),
            entries=entries,
        )

    def end(self) -> list[Sequence]:
        """Every row that samples is given the next token of its sequence."""
        if self._plan is None:
            return []
        tokens = tuple(map(self._token, self._plan.rows))
        result = StepResult(tokens=tokens, finite=(True,) * len(tokens))
        begun = thread_time()
        updates = self._scheduler.complete(self._plan, result)
        self.seconds += thread_time() - begun
        return [self._sequence(update.request) for update in updates if update.finish_reason is not None]

    def check(self) -> None:
        """Every invariant of pages and tree. O(pages). Raises ``InvariantError``."""
        self._scheduler.check()

    def _request(self, request_id: str, sequence: Sequence) -> Request:
        request = Request(
            id=request_id,
            namespace=Namespace(),
            tokens=bytearray(b"".join(segment.tokens() for segment in sequence.prompt)),
            n_prompt=sequence.n_prompt,
            max_tokens=sequence.answer.n_tokens,
            sampling=replace(GREEDY, seed=len(self._sequences)),
        )
        self._sequences.append(sequence)
        return request

    def _sequence(self, request: Request) -> Sequence:
        return self._sequences[request.sampling.seed]

    def _token(self, row: Row) -> int:
        if row.sampling is None:
            return -1
        return self._sequences[row.sampling.seed].answer.first + row.sampling.index
