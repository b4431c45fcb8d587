"""The conversations that pause between two turns, in the order in which they are worth their pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from operator import itemgetter
from time import monotonic
from typing import NamedTuple

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.pauses.pause_times import Kind, PauseTimes, kind_of
from radixkv.runtime.pauses.shared_room import SharedRoom
from radixkv.runtime.protocols.request import Observer
from radixkv.runtime.protocols.returns import NeededPrompt, Returns
from radixkv.runtime.request import Request
from radixkv.tree.neighbours import n_common_tokens
from radixkv.tree.node import TOKEN_BYTES, Namespace
from radixkv.tree.spared import WaitingPrompt
from radixkv.wire.cache_messages import BeginPause, EndPause, PauseBegun, PauseEnded
from radixkv.wire.messages import Submit
from radixkv.wire.stats import PauseStats

MAX_PAUSES = 1024
"""Pauses that are waited for at a time; for a new one the tenant with the most gives up its oldest."""
MAX_SPARED = 256
"""Conversations that an eviction spares, each of which costs it some microseconds. Tenants take turns in them."""
WORTH_OF_OTHERS = 0.5
"""Returns that are expected of a page of unknown use, in as long as it was not used: a page that was evicted after
10 s without a use is thought to be worth 0.05 returns a second. Pauses with a lower rate are not spared."""
MAX_PAUSED_BYTES = 1 << 26
"""Tokens of all pauses, in bytes; beyond it the tenant with the most gives up its oldest. Ended answers have as
many."""
_MAX_ENDED = 1024
"""Ended answers of which the frontend may still say that a prompt can go on from them."""
_REORDER_S = 0.1
"""The order of the pauses is so old at most."""


class _Ended(NamedTuple):
    """An answer from which a prompt may go on."""

    sender: str
    prompt: WaitingPrompt
    turn: Turn


@dataclass(slots=True, eq=False)
class _Pause:
    namespace: Namespace
    key: bytes
    """What the next prompt of the conversation begins with; none once it has ended."""
    session_id: str
    kind: Kind
    began_at: float
    expected_s: float | None
    """How long it takes, as the client has said; None: that is learnt."""


class _Return(NamedTuple):
    """What was seen of a pause when the request arrived that goes on from it."""

    name: str
    """Id of the request whose answer began the pause."""
    pause_s: float
    can_use: bool
    """Whether the request has a page in common with the conversation. If not, it was of no use to keep it."""
    is_on_device: bool
    """Whether the device's cache had all of the conversation that the request can use."""


@dataclass(slots=True, eq=False)
class Turn(Observer):
    """A request that goes on from an answer, or from whose answer a later prompt may go on."""

    pauses: Pauses
    may_pause: bool
    session_id: str
    expected_s: float | None
    """How long the client will be away, as it has said; None: it has not."""
    resumed: _Return | None = None

    def prompt_counted(self, request: Request) -> None:
        """Ends the pause: until now the request could be refused, or wait behind many others."""
        self.pauses.resume(self, request.namespace)

    def ended(self, choices: Sequence[Request], *, is_prompt_computed: bool) -> None:
        """Keeps what the next prompt may begin with."""
        if is_prompt_computed and self.may_pause:
            self.pauses.end_turn(choices[0], self)


class Pauses(Returns):
    """Knows which conversations pause, and how soon they are expected back.

    A pause begins when an answer has called tools or has been given to a user, and ends when the prompt that goes
    on from it is computed. Meanwhile the pages of the conversation are evicted after those of which nothing is
    known, and before those that waiting requests need, and they may be brought back from lower tiers. Those pauses
    come first whose returns are most frequent in the time that they are waited for.

    Pages of which nothing is known are protected all the same: a pause is only spared if its rate of returns is
    above what the pages evicted last were worth, and the longer those were unused, the less that is.

    Args:
        cache: the page cache of the device.
        clock: seconds, monotonic.
    """

    def __init__(self, cache: PageCache, clock: Callable[[], float] = monotonic) -> None:
        self._cache = cache
        self._clock = clock
        self._times = PauseTimes()
        self._ended = SharedRoom[str, _Ended](_MAX_ENDED, MAX_PAUSED_BYTES)
        """By id of the request."""
        self._pauses = SharedRoom[str, _Pause](MAX_PAUSES, MAX_PAUSED_BYTES)
        """By id of the request whose answer began it."""
        self._order: list[_Pause] = []
        """Those that are spared, as of ``_ordered_at``, the first one first."""
        self._ordered_at = -inf
        self._n_returned = self._n_on_device = self._n_given_up = 0

    @staticmethod
    def is_followed(message: Submit) -> bool:
        """Returns whether a request ends a pause, or may begin one. O(1)."""
        return message.may_pause or bool(message.resumes)

    def follow(self, message: Submit, choices: Sequence[Request]) -> Turn:
        """Begins a turn: it ends a pause once its prompt is computed, and another may follow it. O(tokens)."""
        may_pause = message.may_pause and message.reads_cache
        turn = Turn(self, may_pause, message.session_id, message.expected_pause_s)
        self._ended.pop(message.resumes)  # a pause that has not begun yet has ended
        pause = self._pauses.get(message.resumes)
        if pause is not None and pause.namespace == choices[0].namespace:
            (n_cached,) = self._cache.matches([(pause.namespace, pause.key)])
            # The last token has no KV yet, and an activated LoRA may act from elsewhere on in the prompt.
            n_common = n_common_tokens(pause.key, bytes(choices[0].known_key))
            n_needed = min(len(pause.key) // TOKEN_BYTES - 1, n_common)
            states = self._cache.tree.states
            step = max(self._cache.page_size, 0 if states is None else states.block_tokens)
            can_use = n_needed >= self._cache.page_size
            is_on_device = can_use and n_cached > 0 and n_cached + step > n_needed
            turn.resumed = _Return(message.resumes, self._clock() - pause.began_at, can_use, is_on_device)
        return turn

    def resume(self, turn: Turn, namespace: Namespace) -> None:
        """Ends the pause that a turn goes on from, and all of its session. O(1), with a session O(pauses).

        Nothing is learnt of a return that can use no page of the conversation.
        """
        returned, turn.resumed = turn.resumed, None
        if returned is not None and (pause := self._take(returned.name)) is not None:
            if returned.can_use:
                self._times.add(pause.kind, returned.pause_s, has_returned=True, is_on_device=returned.is_on_device)
            self._n_returned += 1
            self._n_on_device += returned.is_on_device
        if turn.session_id:
            self.close_session(namespace, turn.session_id)

    def close_session(self, namespace: Namespace, session_id: str) -> None:
        """Ends the pauses of a session, in which nobody goes on from there. O(pauses)."""
        closed = namespace, session_id
        for name in [name for name, one in self._pauses.items() if (one.namespace, one.session_id) == closed]:
            self._take(name)

    def end_turn(self, choice: Request, turn: Turn) -> None:
        """Keeps the tokens of an answer, until the frontend says that a prompt can go on from it. O(tokens)."""
        prompt = choice.namespace, bytes(choice.known_key)
        self._ended.put(choice.sender, choice.id, _Ended(choice.sender, prompt, turn), len(prompt[1]))

    def begin(self, message: BeginPause) -> PauseBegun:
        """Begins the pause after an answer; that of an unknown one is ignored. O(tools · log tools)."""
        ended = self._ended.pop(message.request_id)
        if ended is not None and (turn := ended.turn).expected_s != 0:
            kind = kind_of(ended.sender, message.tools)
            self._take(message.request_id)
            pause = _Pause(*ended.prompt, turn.session_id, kind, self._clock(), turn.expected_s)
            for given_up in self._pauses.put(ended.sender, message.request_id, pause, len(pause.key)):
                given_up.key = b""
            self._ordered_at = -inf
        return PauseBegun(message.id)

    def end(self, message: EndPause) -> PauseEnded:
        """Ends a pause whose chat goes on elsewhere; one that is unknown is ignored. O(1).

        Nothing is learnt of it: its pages were neither of use nor kept in vain for as long as they might have been.
        """
        self._ended.pop(message.request_id)
        self._take(message.request_id)
        return PauseEnded(message.id)

    def expected(self) -> Iterator[NeededPrompt]:
        """Yields what the next prompts of spared conversations begin with, the first one first.

        O(spared); O(pauses · log pauses) where the order is older than ``_REORDER_S``.
        """
        now = self._clock()
        if self._pauses and now - self._ordered_at > _REORDER_S:
            self._reorder(now)
        for pause in self._order:
            if pause.key:
                yield pause

    def stats(self) -> PauseStats:
        """Returns counters and gauges. O(pauses · log pauses + kinds)."""
        n_spared = sum(len(one.key) // TOKEN_BYTES for one in self.expected())
        kinds = self._times.stats(Counter(pause.kind for _, pause in self._pauses.items()))
        return PauseStats(
            len(self._pauses), n_spared, self._n_returned, self._n_on_device, self._n_given_up, kinds=kinds
        )

    def clear(self) -> None:
        """Forgets all pauses, because the cache is emptied; what is learnt stays. O(pauses)."""
        for name, _ in list(self._pauses.items()):
            self._take(name)
        for name, _ in list(self._ended.items()):
            self._ended.pop(name)

    def _take(self, name: str) -> _Pause | None:
        """Removes a pause, for which nobody waits any more, and returns it; None if there is none."""
        pause = self._pauses.pop(name)
        if pause is not None:
            pause.key = b""
        return pause

    def _reorder(self, now: float) -> None:
        """Gives up what has paused for too long, and orders the rest."""
        evicted_age_s = self._cache.tree.evicted_age_s
        min_rate = WORTH_OF_OTHERS / evicted_age_s if evicted_age_s else 0.0
        rates: list[tuple[float, _Pause]] = []
        for name, pause in list(self._pauses.items()):
            age_s = now - pause.began_at
            if pause.expected_s is None:
                rate, patience_s = self._times.rate(pause.kind, age_s), self._times.patience_s(pause.kind)
            else:
                rate, patience_s = 1 / max(pause.expected_s - age_s, _REORDER_S), 2 * pause.expected_s
            if age_s > patience_s:
                self._give_up(name, age_s)
            elif rate > min_rate:
                rates.append((rate, pause))
        rates.sort(key=itemgetter(0), reverse=True)
        self._order, self._ordered_at = [pause for _, pause in _in_turn(rates)], now

    def _give_up(self, name: str, age_s: float) -> None:
        pause = self._take(name)
        if pause is not None and pause.expected_s is None:
            self._times.add(pause.kind, age_s, has_returned=False)
        self._n_given_up += 1


def _in_turn(rates: Sequence[tuple[float, _Pause]]) -> Sequence[tuple[float, _Pause]]:
    """Returns the pauses that are spared, in their order; of too many, first each tenant's best, then its second.

    Args:
        rates: the pauses with their rates, the highest rate first.
    """
    if len(rates) <= MAX_SPARED:
        return rates
    n_before: Counter[str] = Counter()
    turns: list[tuple[int, int]] = []
    for place, (_, pause) in enumerate(rates):
        tenant, _ = pause.kind
        turns.append((n_before[tenant], place))
        n_before[tenant] += 1
    return [rates[place] for place in sorted(place for _, place in sorted(turns)[:MAX_SPARED])]
