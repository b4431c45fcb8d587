"""Prefixes that waiting prompts have in common with those that are being computed."""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

from radixkv.runtime.request import Phase, Request
from radixkv.runtime.states.prompt_trie import PromptTrie
from radixkv.tree.neighbours import n_common_tokens
from radixkv.tree.node import TOKEN_BYTES

MAX_PLACES = 8
"""Most states that are kept in a row for waiting prompts, those of the longest prefixes."""


class _Wait(NamedTuple):
    """What a waiting prompt waits for."""

    computing: Request
    """Computes the prefix."""
    position: int
    """Where the prefix ends."""


class CommonPrefixes:
    """Knows where waiting prompts leave those that are being computed, so that a state is kept there.

    A prompt waits for such a state in place of computing the prefix a second time. It waits at most once for each
    position, and only while the other one runs, so none waits for ever. See docs/decisions/0078-fan-out.md.

    Args:
        block_tokens: positions of states are multiples of it.
        n_least: fewest tokens for which a prompt waits.
    """

    def __init__(self, block_tokens: int, n_least: int) -> None:
        self._block_tokens = block_tokens
        self._n_least = n_least
        self._prompts = PromptTrie()
        """Those that wait for their first row, and those that have a row and need another one."""
        self._waits: dict[Request, _Wait] = {}
        """What waiting requests wait for, or have waited for last."""
        self._let_through: list[Request] = []
        """Those that did not have to wait when they were asked for last. They may have pages, and no row yet."""

    def arrived(self, request: Request) -> None:
        """Takes note of a request that waits for its first row. Costs what ``PromptTrie.add`` does."""
        self._prompts.add(request, request.key)

    def left(self, request: Request) -> None:
        """Forgets a request. Costs what ``PromptTrie.remove`` does; O(1) for one that is not known."""
        self._waits.pop(request, None)
        if request in self._let_through:
            self._let_through.remove(request)
        self._prompts.remove(request)

    def plan_row(self, request: Request, start: int, end: int) -> set[int]:
        """Takes note of a prompt's row in the next plan; forgets the prompt if it is its last row.

        Returns the positions of states up to which waiting prompts have the prompt's tokens, those after ``start``
        and up to ``end``, at most ``MAX_PLACES``. Each leaves a token of both prompts to compute. O(edges) of the
        trie, and what adding a prompt costs if it is not known.

        Args:
            request: has a row in the next plan.
            start: first position of that row.
            end: the position after its last one.
        """
        prompts = self._prompts
        is_first = not prompts.is_computed(request)
        if is_first:
            if request not in prompts:
                prompts.add(request, bytes(request.known_key))
            prompts.compute(request)
            self._waits.pop(request, None)
        places: set[int] = set()
        # Others find all before ``start`` as well, and do not wait for little.
        if not is_first or request.n_known - start >= self._n_least:
            for place in takewhile(lambda place: place > start, map(self._floor, prompts.partings(request))):
                if place <= end:
                    places.add(place)
                if len(places) == MAX_PLACES:
                    break
        if end >= request.n_known:
            self.left(request)
        elif request in self._let_through:
            self._let_through.remove(request)
        return places

    def awaited_position(self, request: Request) -> int | None:
        """Returns the position up to which a request that runs is going to compute a waiting one's prompt; None if
        there is no reason to wait.

        It is the position of a state. Costs what ``_longest_wait`` does, and O(1) while the answer stays the same.
        """
        last = self._waits.get(request)
        if last is not None and _is_coming(last):
            return last.position
        if request not in self._prompts:
            return None
        wait = self._longest_wait(request)
        n_waited = 0 if last is None else last.position
        if wait is None or wait.position < n_waited + self._n_least:
            return None
        self._waits[request] = wait
        return wait.position

    def is_coming(self, request: Request) -> bool:
        """Returns whether what a waiting request has waited for last is still to come. O(1)."""
        last = self._waits.get(request)
        return last is not None and _is_coming(last)

    def let_through(self, request: Request) -> None:
        """Takes note that a request that waits may be admitted now. O(1)."""
        self._let_through = [one for one in self._let_through if one.block_table is not None]
        self._let_through.append(request)

    def freed(self, request: Request) -> None:
        """Takes note that a request has lost its pages. It waits again if it has had no row; another one is
        forgotten, at the cost of ``left``."""
        if request.phase not in (Phase.WAITING, Phase.LOADING):
            self.left(request)

    def _longest_wait(self, request: Request) -> _Wait | None:
        """Returns the wait for the longest prefix of a waiting prompt to whose end a request is on its way; None
        without one.

        Of requests that share the most with it, one may have passed that place while another one is still to come.
        O(edges) of the trie, and O(requests that share the most) where some have passed.
        """
        nearest, n_common = self._prompts.nearest_computed(request)
        longest = next(filter(_is_coming, (self._wait(request, one, n_common) for one in nearest)), None)
        first = request.key[: self._n_least * TOKEN_BYTES]
        for one in self._let_through:
            if one is not request and one.block_table is not None and one.namespace == request.namespace:
                key = one.key or bytes(one.known_key)
                if key.startswith(first):
                    wait = self._wait(request, one, n_common_tokens(key, request.key))
                    if _is_coming(wait) and (longest is None or wait.position > longest.position):
                        longest = wait
        return longest

    def _wait(self, request: Request, computing: Request, n_common: int) -> _Wait:
        return _Wait(computing, self._floor(min(n_common, request.n_known - 1)))

    def _floor(self, n_tokens: int) -> int:
        return n_tokens - n_tokens % self._block_tokens


def _is_coming(wait: _Wait) -> bool:
    """Whether the other request runs, or is about to, and has not come to the position."""
    one = wait.computing
    return (
        one.block_table is not None
        and one.phase not in (Phase.PREEMPTED, Phase.FINISHED)
        and not one.recovery.is_retried
        and one.n_scheduled < wait.position
    )
