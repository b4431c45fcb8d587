"""Prefixes that waiting prompts have in common with those that are being computed."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from sortedcontainers import SortedDict

from radixkv.runtime.request import Phase, Request
from radixkv.tree.neighbours import n_common_tokens
from radixkv.tree.node import TOKEN_BYTES, Namespace

MAX_LEVELS = 8
"""Most lengths at which waiting prompts leave a prompt that are looked at for a row, the longest first."""
_AFTER_ALL = b"\xff" * TOKEN_BYTES
"""Is greater than the bytes of any token."""


class _Wait(NamedTuple):
    """What a waiting prompt waits for."""

    computing: Request
    """Computes the prefix."""
    position: int
    """Where the prefix ends."""


_Prompts: TypeAlias = SortedDict[tuple[bytes, int], Request]
"""Prompts by their tokens and serials. Token prefixes are byte prefixes, so no other prompt has more in common with
one than its neighbours in this order."""


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
        self._waiting: dict[Namespace, _Prompts] = {}
        self._computed: dict[Namespace, _Prompts] = {}
        """Those that have a row and need another one."""
        self._keys: dict[Request, tuple[bytes, int]] = {}
        """The key of each request in ``_waiting`` or ``_computed``."""
        self._begun: set[Request] = set()
        """The requests in ``_computed``."""
        self._waits: dict[Request, _Wait] = {}
        """What waiting requests wait for, or have waited for last."""
        self._let_through: list[Request] = []
        """Those that did not have to wait when they were asked for last. They may have pages, and no row yet."""

    def arrived(self, request: Request) -> None:
        """Takes note of a request that waits for its first row. O(log waiting) comparisons of prompts."""
        self._enter(self._waiting, request, request.key)

    def left(self, request: Request) -> None:
        """Forgets a request. O(log prompts) comparisons of prompts; O(1) for one that is not known."""
        self._waits.pop(request, None)
        if request in self._let_through:
            self._let_through.remove(request)
        key = self._keys.pop(request, None)
        if key is None:
            return
        prompts_of = self._computed if request in self._begun else self._waiting
        self._begun.discard(request)
        prompts = prompts_of[request.namespace]
        del prompts[key]
        if not prompts:
            del prompts_of[request.namespace]

    def places(self, request: Request, start: int, end: int) -> set[int]:
        """Returns the positions of states up to which waiting prompts have a prompt's tokens, those after
        ``start`` and up to ``end``.

        Each leaves a token of both prompts to compute. At most ``MAX_LEVELS`` times O(log waiting) comparisons of
        prompts up to ``end``.

        Args:
            request: has a row in the next plan.
            start: first position of that row.
            end: the position after its last one.
        """
        is_first = request not in self._begun
        key = self._keys[request][0] if request in self._keys else bytes(request.tokens)
        if end >= request.n_known:
            self.left(request)
        elif is_first:
            self.left(request)
            self._begun.add(request)
            self._enter(self._computed, request, key)
        prompts = self._waiting.get(request.namespace)
        n_first, n_most = self._floor(start) + self._block_tokens, len(key) // TOKEN_BYTES - 1
        if not prompts or n_first > end or (is_first and request.n_known - start < self._n_least):
            return set()  # others find all before ``start`` as well, and do not wait for so little
        places: set[int] = set()
        low = key[: (end + self._block_tokens) * TOKEN_BYTES]  # no place is behind the row, wherever they leave it
        first, rest = low[: n_first * TOKEN_BYTES], low[n_first * TOKEN_BYTES :]
        for level in range(MAX_LEVELS):
            n_low = len(low) // TOKEN_BYTES
            below = prompts.bisect_left((low,))
            above = prompts.bisect_left((low + _AFTER_ALL,))
            if not level and below < above:  # prompts that begin with all that is looked at
                places.add(min(n_low, n_most))
            if below < above and prompts.peekitem(below)[0][0] == low:  # ends where others leave
                places.add(n_low - 1)
            n_common = 0
            beside = [prompts.peekitem(place)[0][0] for place in (below - 1, above) if 0 <= place < len(prompts)]
            for other in beside:
                if other.startswith(first):
                    n_of_other = n_first + n_common_tokens(rest, other[len(first) : len(low)])
                    places.add(min(n_of_other, len(other) // TOKEN_BYTES - 1, n_most))
                    n_common = max(n_common, n_of_other)
            if not n_common:
                break
            low = key[: n_common * TOKEN_BYTES]
        return {place for place in map(self._floor, places) if start < place <= end}

    def awaited_position(self, request: Request) -> int | None:
        """Returns the position up to which a request that runs is going to compute a waiting one's prompt; None if
        there is no reason to wait.

        It is the position of a state. O(log prompts being computed) comparisons of prompts, and O(1) while the
        answer stays the same.
        """
        last = self._waits.get(request)
        if last is not None and _is_coming(last):
            return last.position
        if request not in self._keys:
            return None
        computing, n_common = self._nearest(request)
        if computing is None:
            return None
        wait = _Wait(computing, self._floor(min(n_common, request.n_known - 1)))
        n_waited = 0 if last is None else last.position
        if wait.position < n_waited + self._n_least or not _is_coming(wait):
            return None
        self._waits[request] = wait
        return wait.position

    def let_through(self, request: Request) -> None:
        """Takes note that a request that waits may be admitted now. O(1)."""
        self._let_through = [one for one in self._let_through if one.block_table is not None]
        self._let_through.append(request)

    def freed(self, request: Request) -> None:
        """Takes note that a request has lost its pages; one that has had no row waits again. O(log prompts)."""
        if request.phase is not Phase.WAITING:
            self.left(request)

    def _nearest(self, request: Request) -> tuple[Request | None, int]:
        """Returns the request that computes the most of a waiting one's prompt, and how many tokens."""
        nearest: tuple[Request | None, int] = None, 0
        candidates: list[tuple[bytes, Request]] = []
        if prompts := self._computed.get(request.namespace):
            place = prompts.bisect_left((request.key,))
            for (tokens, _), one in prompts.items()[max(0, place - 1) : place + 1]:
                candidates.append((tokens, one))
        for one in self._let_through:
            if one is not request and one.block_table is not None and one.namespace == request.namespace:
                candidates.append((one.key or bytes(one.tokens), one))
        first = request.key[: self._n_least * TOKEN_BYTES]
        for key, one in candidates:
            if not key.startswith(first):
                continue
            n_common = n_common_tokens(key, request.key)
            if n_common > nearest[1]:
                nearest = one, n_common
        return nearest

    def _floor(self, n_tokens: int) -> int:
        return n_tokens - n_tokens % self._block_tokens

    def _enter(self, prompts_of: dict[Namespace, _Prompts], request: Request, tokens: bytes) -> None:
        key = self._keys[request] = tokens, request.serial
        prompts_of.setdefault(request.namespace, SortedDict())[key] = request


def _is_coming(wait: _Wait) -> bool:
    """Whether the other request runs, or is about to, and has not come to the position."""
    one = wait.computing
    return (
        one.block_table is not None
        and one.phase not in (Phase.PREEMPTED, Phase.FINISHED)
        and not one.recovery.is_retried
        and one.n_scheduled < wait.position
    )
