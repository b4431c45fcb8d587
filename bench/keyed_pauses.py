"""A prototype that learns from ``prompt_cache_key`` which branches of a conversation are over.

Decision 78 has what it gains; the engine has none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.pauses.pause_times import Kind, PauseTimes
from radixkv.runtime.pauses.pauses import Pauses, Turn
from radixkv.runtime.request import Request
from radixkv.tree.node import TOKEN_BYTES, Namespace, first_without_branch
from radixkv.wire.cache_messages import BeginPause, PauseBegun
from radixkv.wire.messages import Submit

LEFT = "(left)"
"""Stands beside the tools of a pause whose client has meanwhile gone on elsewhere with the same key."""
FIRST_PATIENCE_LEFT_S = 60.0
"""Age at which such a pause is given up where none of its kind has ended yet."""
DECAY = 0.97
"""What remains of older pauses with each that ends, where they are counted."""
MIN_ENDED = 4.0
"""Fewest pauses, as they are counted, that show that hardly any of their kind comes back."""
MAX_HOPELESS = 0.1
"""Largest share of pauses that come back where hardly any does."""


class _KeyedTimes(PauseTimes):
    """Also counts how many pauses of each kind came back lately."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[Kind, tuple[float, float]] = {}
        """Pauses of each kind that came back, and all of them that are over; older ones count less."""

    def add(self, kind: Kind, pause_s: float, *, has_returned: bool, is_on_device: bool = False) -> None:
        """See ``PauseTimes``."""
        super().add(kind, pause_s, has_returned=has_returned, is_on_device=is_on_device)
        n_returned, n_over = self._counts.get(kind, (0.0, 0.0))
        self._counts[kind] = DECAY * n_returned + has_returned, DECAY * n_over + 1

    def patience_s(self, kind: Kind) -> float:
        """See ``PauseTimes``."""
        n_returned, _ = self._counts.get(kind, (0.0, 0.0))
        return FIRST_PATIENCE_LEFT_S if LEFT in kind[1] and not n_returned else super().patience_s(kind)

    def is_hopeless(self, kind: Kind) -> bool:
        """Returns whether hardly any pause of this kind came back lately."""
        n_returned, n_over = self._counts.get(kind, (0.0, 0.0))
        return n_over >= MIN_ENDED and n_returned <= MAX_HOPELESS * n_over


class KeyedPauses(Pauses):
    """Takes pauses for another kind once another prompt of their key does not go on from them.

    If hardly any pause of that kind comes back, what only its conversation has in the cache is evicted first.

    Args:
        cache: the page cache of the device.
        clock: seconds, monotonic.
        key_of: tells the key of a request.
    """

    def __init__(self, cache: PageCache, clock: Callable[[], float], key_of: Callable[[Submit], str]) -> None:
        super().__init__(cache, clock)
        self._times: _KeyedTimes = _KeyedTimes()
        self._key_of = key_of
        self._keys: dict[Turn, str] = {}
        self._here: dict[tuple[Namespace, str], list[str]] = {}
        """The pauses of each key that were not left, by id of the request whose answer began them."""

    def follow(self, message: Submit, choices: Sequence[Request]) -> Turn:
        """See ``Pauses``."""
        turn = super().follow(message, choices)
        self._keys[turn] = self._key_of(message)
        return turn

    def begin(self, message: BeginPause) -> PauseBegun:
        """See ``Pauses``."""
        ended = self._ended.get(message.request_id)
        begun = super().begin(message)
        if ended is not None and message.request_id in self._pauses:
            namespace, _ = ended.prompt
            self._here.setdefault((namespace, self._keys.pop(ended.turn)), []).append(message.request_id)
        return begun

    def resume(self, turn: Turn, namespace: Namespace) -> None:
        """Does what ``Pauses`` does, and leaves the other pauses of the turn's key."""
        super().resume(turn, namespace)
        for name in self._here.pop((namespace, self._keys[turn]), ()):
            self._leave(name)

    def _leave(self, name: str) -> None:
        pause = self._pauses.get(name)
        if pause is None:
            return
        tenant, tools = pause.kind
        pause.kind, pause.began_at = (tenant, (*tools, LEFT)), self._clock()
        if self._times.is_hopeless(pause.kind):
            self._demote_own(pause.namespace, pause.key)

    def _demote_own(self, namespace: Namespace, tokens: bytes) -> None:
        """Demotes the pages after the last place where another cached sequence leaves the tokens."""
        demotions = self._cache.tree.demotions
        forest = demotions._forest
        path, _, partial, _ = forest.walk(namespace, tokens)
        if partial is None and path and not path[-1].children:
            first = first_without_branch(path[-1])
            n_shared = sum(len(node.pages) for node in path[: path.index(first)])
            demotions.add(namespace, tokens, n_shared * forest.page_bytes // TOKEN_BYTES)
