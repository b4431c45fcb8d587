"""Sessions: which cached sequences of a conversation nobody will continue, so that they are evicted first."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add
from typing import NamedTuple

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.protocols.request import Observer
from radixkv.runtime.request import Request
from radixkv.tree.neighbours import n_common_tokens
from radixkv.tree.node import TOKEN_BYTES, Namespace
from radixkv.wire.messages import Submit
from radixkv.wire.request_limits import check_session_id

MAX_SESSIONS = 1 << 16
"""Sessions that are remembered."""
MAX_SESSION_TOKENS = 1 << 24
"""Tokens of all sessions that are remembered, in 64 MiB. Beyond either limit, the session that was used least
recently is forgotten: nothing of it is demoted, and closing it finds nothing."""

_Key = tuple[Namespace, str]


class _Tip(NamedTuple):
    serial: int
    tokens: bytes
    """Prompt and answer."""


@dataclass(slots=True, eq=False)
class _Session:
    tips: deque[_Tip] = field(default_factory=deque)
    """Finished turns that no later turn has superseded, in the order of their ends."""
    n_found: int | None = None
    """Tokens that its first turn found in the cache: others may need them. None before the end of that turn."""
    is_closed: bool = False


@dataclass(slots=True, eq=False)
class Turn(Observer):
    """A request of a session."""

    sessions: Sessions
    key: _Key
    session: _Session
    n_ended: int
    """Turns of all sessions that had ended when it began: it supersedes those of its session with lower serials."""
    n_found: int = 0
    """Prompt tokens that the request found in the cache, without those of a part of a page."""

    def prompt_counted(self, request: Request) -> None:
        """Notes what the request found."""
        assert request.cache_use.counted is not None, "the prompt is counted"
        self.n_found = request.cache_use.counted.in_whole_pages.n_cached

    def released(self, request: Request) -> None:
        """Ends the turn, or one of its choices.

        Its pages were released before: the release counts as their use, which would end a demotion.
        """
        self.sessions.end(self, bytes(request.known_key))


class Sessions:
    """Demotes what a session will not continue.

    A turn *supersedes* the turns of its session that had finished when it began. What these had cached beyond their
    common beginning with the new turn is demoted when the new one ends: an answer that was asked for again, a
    history that was rewritten. Turns that run at the same time do not supersede each other. ``close`` demotes what
    is left, and so does the end of a turn whose session was closed meanwhile. What the session's first turn found
    in the cache stays as it is.

    Args:
        caches: the page caches of all tiers that have one, the device's first.
    """

    def __init__(self, caches: Sequence[PageCache]) -> None:
        self._caches = caches
        self._page_size = caches[0].page_size
        self._sessions: OrderedDict[_Key, _Session] = OrderedDict()
        """The sessions used least recently come first."""
        self._n_tokens = 0
        """Tokens of all tips."""
        self._n_ended = 0
        """Turns that have ended, and choices of turns."""

    def begin(self, namespace: Namespace, session_id: str) -> Turn:
        """Begins a turn, and its session if there is none of this id. O(1)."""
        key = namespace, session_id
        session = self._touch(key, _Session())
        self._forget()
        return Turn(self, key, session, self._n_ended)

    def follow(self, message: Submit, choices: Sequence[Request]) -> Turn | None:
        """Begins the turn of a request with a ``session_id``. O(1). Raises ``InvalidRequest`` for a long one.

        Returns None if the request does not read the cache: what a turn finds there says what others may need.
        """
        check_session_id(message.session_id)
        if not message.reads_cache or message.sampling.prompt_logprobs is not None:
            return None
        return self.begin(choices[0].namespace, message.session_id)

    def end(self, turn: Turn, tokens: bytes) -> None:
        """Ends a turn, or one of its choices, once its pages are released.

        O(tokens of the superseded turns), and ``Demotions.add``.

        Args:
            turn: the turn.
            tokens: its prompt and answer.
        """
        session, (namespace, _) = turn.session, turn.key
        if not session.is_closed:
            session = self._touch(turn.key, session)
        if session.n_found is None:
            session.n_found = turn.n_found
        if session.is_closed:
            self._demote(namespace, tokens, self._n_pages_found(session))
            return
        while session.tips and session.tips[0].serial < turn.n_ended:
            superseded = session.tips.popleft().tokens
            self._n_tokens -= len(superseded) // TOKEN_BYTES
            n_pages = max(n_common_tokens(superseded, tokens) // self._page_size, self._n_pages_found(session))
            self._demote(namespace, superseded, n_pages)
        session.tips.append(_Tip(self._n_ended, tokens))
        self._n_ended += 1
        self._n_tokens += len(tokens) // TOKEN_BYTES
        self._forget()

    def close(self, namespace: Namespace, session_id: str) -> list[int] | None:
        """Closes a session; what its running turns have is demoted when they end.

        Costs as much as ``Demotions.add``.

        Returns:
            The number of pages demoted in each cache; None if there is no such session.
        """
        session = self._sessions.pop((namespace, session_id), None)
        if session is None:
            return None
        session.is_closed = True
        demoted = [0 for _ in self._caches]
        for tip in session.tips:
            self._n_tokens -= len(tip.tokens) // TOKEN_BYTES
            counts = self._demote(namespace, tip.tokens, self._n_pages_found(session))
            demoted = list(map(add, demoted, counts))
        return demoted

    def of_adapter(self, adapter: str) -> list[tuple[Namespace, str]]:
        """Returns the sessions of an adapter, which has its digest. O(sessions)."""
        return [key for key in self._sessions if key[0].adapter == adapter]

    def _demote(self, namespace: Namespace, tokens: bytes, n_pages_kept: int) -> list[int]:
        """Demotes a sequence but for its first pages; returns the number of pages in each cache."""
        n_kept = n_pages_kept * self._page_size
        return [cache.tree.demotions.add(namespace, tokens, n_kept) for cache in self._caches]

    def _n_pages_found(self, session: _Session) -> int:
        # A prompt that is cached as a whole counts one token less, because its last token is always computed.
        return 0 if not session.n_found else (session.n_found + 1) // self._page_size

    def _touch(self, key: _Key, new: _Session) -> _Session:
        """Returns the session of a key, which is ``new`` if there is none, and notes its use."""
        session = self._sessions.setdefault(key, new)
        self._sessions.move_to_end(key)
        return session

    def _forget(self) -> None:
        """Forgets the sessions used least recently that are too many."""
        while len(self._sessions) > MAX_SESSIONS or self._n_tokens > MAX_SESSION_TOKENS:
            _, session = self._sessions.popitem(last=False)
            self._n_tokens -= sum(len(tip.tokens) for tip in session.tips) // TOKEN_BYTES
            session.tips.clear()
