"""Paged memory: the engine's own scheduler and page cache, with or without the radix tree, and without a model."""

from __future__ import annotations

from itertools import count
from time import thread_time
from typing import Literal

from msgspec.structs import replace

from radixkv.lab.studies.paging.memory import SlotUsage
from radixkv.lab.studies.paging.sequences import SimulatedSequence, Turn, count_distinct_tokens
from radixkv.runtime.assemble import open_scheduler
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import GREEDY, Phase, Request
from radixkv.runtime.scheduler.scheduler import SchedulerLimits
from radixkv.runtime.step.plan import Row, StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.tree.node import Namespace

Sharing = Literal["prefixes", "choices", "nothing"]

_RESERVED_TOKENS, _MAX_RESERVED_SHARE = 16, 1 / 24
"""Tokens and share of the pool that an admission leaves free: little, because the study compares how many sequences
fit. The results in the docs were measured with these values."""


class PagedScheme:
    """A scheme that allocates page by page and preempts when pages run out.

    Rows and tokens per step are not limited, so only memory limits which sequences run. The granules of virtual
    contiguous memory are pages too. Only what leads to a page differs, see ``n_entries_per_page``.

    Args:
        n_slots: token slots of the pool; a remainder smaller than a page is counted as free.
        page_size: tokens per page.
        sharing: which sequences share whole pages by prefix, through the radix tree: all; only the choices of one
            request, as with PagedAttention's copy-on-write; or none. The choices of a request compute their prompt
            once. What they do not share of it, each has a copy of.
        n_entries_per_page: entries that map a page: one of a block table, or a granule in each tensor of the cache.
    """

    n_copied = 0
    """Tokens copied because a sequence has outgrown its memory: a page is added instead."""

    def __init__(
        self, n_slots: int, page_size: int, *, sharing: Sharing = "prefixes", n_entries_per_page: int = 1
    ) -> None:
        self._sharing = sharing
        is_sharing = sharing != "nothing"
        self.cache = PageCache(n_slots // page_size, page_size, is_sharing=is_sharing, min_copied_tokens=page_size)
        self._n_unused = n_slots % page_size
        self._n_entries_per_page = n_entries_per_page
        limits = SchedulerLimits(
            max_num_seqs=n_slots,
            max_num_batched_tokens=2 * n_slots,
            max_queued_requests=1 << 31,
            num_reserved_decode_tokens=_RESERVED_TOKENS,
            max_reserved_decode_share=_MAX_RESERVED_SHARE,
        )
        self.scheduler = open_scheduler(self.cache, limits, schedule_policy="fcfs")
        """Forms the batches."""
        self._ids = (str(number) for number in count())
        self._sequences: list[SimulatedSequence] = []
        """All sequences; the sampling seed of a request is its index here."""
        self._plan: StepPlan | None = None
        self.seconds = 0.0
        """Processor time of scheduler, cache and tree."""

    @property
    def n_waiting(self) -> int:
        """Sequences that have not started, or were preempted; excludes choices that wait for their prompt's KV."""
        return len(self.scheduler.waiting)

    @property
    def n_preemptions(self) -> int:
        """How often a sequence lost its memory before its end and had to start again."""
        return self.scheduler.n_preemptions

    def add(self, turn: Turn) -> None:
        """Queues the sequences as choices of one request."""
        request_id = next(self._ids)
        leader, *followers = [self._request(request_id, sequence) for sequence in turn.sequences]
        self.scheduler.add(leader, followers)

    def begin(self) -> None:
        """Schedules the next step."""
        started = thread_time()
        self._plan = self.scheduler.schedule()
        self.seconds += thread_time() - started

    def running(self) -> list[SimulatedSequence]:
        """Returns the running sequences in the order of their start, then those preempted in this step.

        A sequence that is preempted in this step may still have a row in it, which may produce its last token.
        """
        running = self.scheduler.running
        preempted = [
            request for request in running.releasing if request.phase is Phase.PREEMPTED and request.n_in_flight
        ]
        return [self.sequence_of(request) for request in (*running, *preempted)]

    def slot_usage(self) -> SlotUsage:
        """Returns the slot usage of this step. O(running).

        Any free page serves any sequence, so there is no external fragmentation. Sequences that release their pages
        still hold them in this step, because a fork copies from them. Pages that only choices share are free after
        their request: no later one can read them.
        """
        cache, page_size = self.cache, self.cache.page_size
        n_evictable = cache.tree.n_pages_evictable
        n_cached = n_evictable if self._sharing == "prefixes" else 0
        occupied = cache.tree.n_pages_leased * page_size
        reserved = entries = 0
        stored: list[tuple[SimulatedSequence, int]] = []
        running = self.scheduler.running
        for request in (*running, *running.releasing):
            blocks, sequence = request.blocks, self.sequence_of(request)
            occupied += request.n_scheduled - blocks.n_leased * page_size
            entries += len(blocks.pages)
            stored.append((sequence, request.n_scheduled))
            if request.phase is Phase.RUNNING:
                n_empty = len(blocks.pages) * page_size - request.n_scheduled
                reserved += min(n_empty, sequence.n_stored - request.n_scheduled)
        return SlotUsage(
            occupied=occupied,
            reserved=reserved,
            internal=(cache.n_pages - cache.n_available) * page_size - occupied - reserved,
            external=0,
            free=(cache.n_free + n_evictable - n_cached) * page_size + self._n_unused,
            cached=n_cached * page_size,
            duplicate=occupied - count_distinct_tokens(stored),
            stored=sum(n_tokens for _, n_tokens in stored),
            entries=entries * self._n_entries_per_page,
        )

    def end(self) -> list[SimulatedSequence]:
        """Gives each row that samples the next token of its sequence; returns the sequences that finished."""
        if self._plan is None:
            return []
        tokens = tuple(map(self._token, self._plan.rows))
        result = StepResult(tokens=tokens, finite=(True,) * len(tokens))
        started = thread_time()
        updates = self.scheduler.complete(self._plan, result)
        self.seconds += thread_time() - started
        return [self.sequence_of(update.request) for update in updates if update.finish_reason is not None]

    def check(self) -> None:
        """Checks all invariants of pages and tree. O(pages). Raises ``InvariantError``."""
        self.scheduler.check()

    def _request(self, request_id: str, sequence: SimulatedSequence) -> Request:
        request = Request(
            id=request_id,
            namespace=Namespace(salt=request_id) if self._sharing == "choices" else Namespace(),
            known_key=bytearray(b"".join(token_range.tokens() for token_range in sequence.prompt)),
            n_prompt=sequence.n_prompt,
            max_tokens=sequence.answer.n_tokens,
            sampling=replace(GREEDY, seed=len(self._sequences)),
        )
        self._sequences.append(sequence)
        return request

    def sequence_of(self, request: Request) -> SimulatedSequence:
        """Returns the sequence of a request."""
        return self._sequences[request.sampling.seed]

    def _token(self, row: Row) -> int:
        if row.sampling is None:
            return -1
        return self._sequences[row.sampling.seed].answer.first + row.sampling.index
