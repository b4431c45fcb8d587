"""``ExpectedHeadroom``: foresees the pages that running answers will need, from when they are expected to end."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.headroom.answer_lengths import AnswerLengths
from radixkv.runtime.headroom.session_answers import SessionAnswer
from radixkv.runtime.protocols.headroom import Headroom
from radixkv.runtime.request import Request

FULL_ROWS = 208
"""Rows from which a step gains little by more of them: a GPU computes about so many tokens in the time in which it
reads the weights (an H200: 206 by its data sheet, 191 measured with an 8B model in bfloat16)."""
_GOLDEN_RATIO = 0.6180339887498949
_UNBOUNDED = 1 << 40
"""More tokens than any answer has."""
_FIRST_CAPACITY = 256
"""Ends for which there is memory at first."""


class _End(NamedTuple):
    """When a running answer is expected to end, or to need no more pages."""

    step: int
    serial: int
    n_offset: int
    """Tokens whose pages come free with it, less the number of the step. It gives none back where it goes on."""
    request: Request


_STEP = attrgetter("step")


class ExpectedHeadroom(Headroom):
    """Follows the running answers, each to its expected end, and counts their pages until then.

    A request that no token can end gets ``max_tokens``. Others get a length of the answers that have ended lately:
    of the same session, of the same tenant with about the same ``max_tokens``, or of the same tenant. Each request
    gets another quantile of the lengths, so that all together are distributed as those that have ended. One that
    outlives its length gets a quantile of the longer ones. While there are none, its end is *unknown*.

    An answer with a ``kv_budget`` needs no more pages once it holds the most that it may; those that it has dropped
    do not count.

    A new request fits if there are pages for all running ones until it has come far enough. A preemption after
    that costs less than steps with fewer rows: see ``_n_steps_ahead`` and docs/decisions/0074-expected-answers.md.

    Equal calls give equal results.

    Args:
        cache: the page cache of the device.
        n_unknown_tokens: tokens that an answer needs whose end is unknown.
        max_unknown_share: limit of the pages of these, as a fraction of the pool.
    """

    def __init__(self, cache: PageCache, *, n_unknown_tokens: int, max_unknown_share: float) -> None:
        self._cache = cache
        self._n_unknown_tokens = n_unknown_tokens
        self._max_unknown_share = max_unknown_share
        self._lengths = AnswerLengths()
        self._ends: list[_End] = []
        """Of running answers, ascending: of each its end, or when it stops growing if that is before."""
        self._steps: npt.NDArray[np.int64] = np.zeros(_FIRST_CAPACITY, np.int64)
        self._offsets: npt.NDArray[np.int64] = np.zeros(_FIRST_CAPACITY, np.int64)
        """``step`` and ``n_offset`` of each of the ends, int64, at the beginning of arrays that may be longer."""
        self._end_of: dict[Request, _End] = {}
        self._unknown: dict[Request, None] = {}
        """Running answers whose ends are unknown; that which was tried last comes last."""
        self._step = 0
        self._n_changes = 0
        self._last: tuple[Request, int, int] | None = None
        """What ``n_expected`` has returned last, for which request, at which change."""

    def step(self) -> None:
        """Takes note of a step, in which each running answer gets a token. O(1)."""
        self._step += 1
        self._n_changes += 1

    def started(self, request: Request) -> None:
        """Begins to follow a request that runs. O(nodes of its path + log running)."""
        self._n_changes += 1
        self._foresee(request)

    def stopped(self, request: Request) -> None:
        """Follows a request no longer, if it did. O(log running)."""
        self._n_changes += 1
        self._unknown.pop(request, None)
        end = self._end_of.pop(request, None)
        if end is not None:
            index = bisect_left(self._ends, end)
            del self._ends[index]
            n_ends = len(self._ends)
            for values in (self._steps, self._offsets):
                values[index:n_ends] = values[index + 1 : n_ends + 1]

    def ended(self, request: Request) -> None:
        """Learns how long an answer was. Costs what ``AnswerLengths.add`` does."""
        if request.continuation is None and not request.is_canary:
            self._lengths.add(_keys(request), request.n_outputs)

    def n_expected(self, request: Request) -> int:
        """Returns how many pages running answers will need, with that of ``request``; 0 if its end is unknown.

        O(running), and O(1) if nothing has happened since the last call for the request.
        """
        if self._last is not None and self._last[0] is request and self._last[1] == self._n_changes:
            return self._last[2]
        self._foresee_again()
        n_tokens = self._n_tokens_with(request)
        n_pages = 0 if n_tokens is None else self._cache.pages_for(n_tokens) + self._n_unknown_pages()
        self._last = request, self._n_changes, n_pages
        return n_pages

    def _n_tokens_with(self, request: Request) -> int | None:
        """Returns the most tokens that running answers with known ends will have beyond those of now."""
        length = self._length(request, request.n_outputs)
        if length is None:
            return None
        now, n_rows = self._step, len(self._ends) + 1
        n_steps = length - request.n_outputs
        if not request.recovery.n_lost:  # one that was preempted is not preempted over and over
            n_steps = _n_steps_ahead(n_steps, request.n_known, n_rows + len(self._unknown))
        # At the end after k others, n - k answers have grown for ``step - now`` steps, and the k have given back
        # ``n_offset + now`` tokens each. So they need (n - k) * step - (sum of the k offsets) - n * now.
        last = now + n_steps
        n_ended = bisect_left(self._ends, last, key=_STEP)
        steps, offsets = self._steps[:n_ended], self._offsets[:n_ended]
        full = now + self._n_growing(request, request.n_outputs)
        if full < last:  # from then on it needs as many as before, as others that give none back
            n_ended += 1
            index = np.searchsorted(steps, full)
            steps, offsets = np.insert(steps, index, full), np.insert(offsets, index, -full)
        n_most = (n_rows - n_ended) * last
        if n_ended:
            sums = offsets.cumsum()
            needs = steps * np.arange(n_rows, n_rows - n_ended, -1) - (sums - offsets)
            n_most = max(n_most - int(sums[-1]), int(needs.max()))
        return max(0, n_most - n_rows * now)

    def _n_unknown_pages(self) -> int:
        n_pages = self._cache.pages_for(len(self._unknown) * self._n_unknown_tokens)
        return min(n_pages, int(self._cache.n_pages * self._max_unknown_share))

    def _foresee(self, request: Request) -> None:
        n_outputs = request.n_outputs + request.n_output_placeholders
        n_growing = self._n_growing(request, n_outputs)
        if not n_growing:
            return
        length = self._length(request, n_outputs)
        if length is None:
            self._unknown[request] = None
            return
        n_steps = max(0, length - n_outputs)  # 0: it has its last row
        if n_growing < n_steps:
            step = self._step + n_growing
            end = _End(step, request.serial, -step, request)  # it keeps its pages: none comes free in that step
        else:
            n_own = request.n_prompt + n_outputs - _n_shared_pages(request.blocks) * self._cache.page_size
            end = _End(self._step + n_steps, request.serial, n_own - self._step, request)
        self._end_of[request] = end
        index = bisect_left(self._ends, end)
        self._ends.insert(index, end)
        n_ends = len(self._ends)
        if n_ends > len(self._steps):
            self._steps, self._offsets = (np.resize(one, 2 * n_ends) for one in (self._steps, self._offsets))
        for values, value in ((self._steps, end.step), (self._offsets, end.n_offset)):
            values[index + 1 : n_ends] = values[index : n_ends - 1]
            values[index] = value

    def _foresee_again(self) -> None:
        """Foresees again those that should have ended or stopped growing, and one whose end was unknown."""
        late = [end.request for end in self._ends[: bisect_left(self._ends, self._step, key=_STEP)]]
        for request in (*late, *([next(iter(self._unknown))] if self._unknown else ())):
            self.stopped(request)
            self._foresee(request)

    def _n_growing(self, request: Request, n_outputs: int) -> int:
        """Returns for how many tokens after ``n_outputs`` a request may need more pages.

        With an eviction these are the pages up to the most that it may hold, beside those that it holds now.
        """
        if request.kv_eviction is None:
            return _UNBOUNDED
        n_dropped = 0 if request.block_table is None else request.block_table.n_dropped
        n_pages = request.kv_eviction.most_pages(request.n_prompt) + n_dropped
        return max(0, n_pages * self._cache.page_size - request.n_prompt - n_outputs)

    def _length(self, request: Request, n_outputs: int) -> int | None:
        """Returns how long an answer is expected to be that has ``n_outputs`` tokens; None if that is not known."""
        if request.continuation is not None:
            return None
        if not request.stop_token_ids and request.constraint is None:
            return request.max_tokens
        # Multiples of the golden ratio are spread evenly, however many there are.
        length = self._lengths.quantile(_keys(request), request.serial * _GOLDEN_RATIO % 1.0, n_outputs)
        return None if length is None else min(length, request.max_tokens)


def _n_steps_ahead(n_left: int, n_known: int, n_rows: int) -> int:
    """Returns for how many steps there must be pages, so that a request of ``n_left`` more tokens is admitted.

    With few rows, steps with one row more gain more than a later preemption loses: the ``n_known`` tokens and those
    that it has got are computed again. So a request needs pages for a share of its answer only, the share of rows
    in ``FULL_ROWS``, but for as many steps as repay a preemption.
    """
    if n_rows >= FULL_ROWS:
        return n_left
    return min(n_left, max(n_left * n_rows // FULL_ROWS, n_known * n_rows // (FULL_ROWS - n_rows)))


def _keys(request: Request) -> list[Hashable]:
    """Returns by which keys the length of an answer is learnt, the narrowest first."""
    keys: list[Hashable] = [one.key for one in request.observers if isinstance(one, SessionAnswer)]
    return [*keys, (request.sender, request.max_tokens.bit_length()), request.sender]


def _n_shared_pages(blocks: BlockTable) -> int:
    """Returns how many of its pages others lease, too: these do not come free with it. O(nodes of its path)."""
    node = None if blocks.lease is None else blocks.lease.node
    n_pages = 0
    while node is not None:
        if node.n_leases > 1:
            n_pages += len(node.pages)
        node = node.parent
    return n_pages
