"""Sources of drafts: each guesses how the tokens of a request go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from radixkv.runtime.drafts.acceptance import PRIOR
from radixkv.runtime.drafts.own_text import continue_text
from radixkv.runtime.request import Request
from radixkv.tree.node import TOKEN_BYTES
from radixkv.tree.radix_tree import RadixTree

_FORCED_PRIOR = 0.98, 0.95
"""A forced text is certain, but a model may write it with other tokens, the last one above all."""


class Guess(NamedTuple):
    """What may follow the tokens of a request."""

    source: str
    """``tree``, ``prediction``, ``prompt``, ``answers`` or ``grammar``."""
    n_matched: int
    """How many of the request's last tokens it follows, at most the longest ending that is looked for."""
    tokens: bytes
    """The guess, little-endian int32; at least one token."""
    prior: tuple[float, float] = PRIOR
    """The chances of its kind that are assumed before any was compared, see ``Acceptance``."""


class Source(Protocol):
    """Guesses how the tokens of a request go on. A guess changes nothing and takes microseconds."""

    def guess(self, request: Request, n_tokens: int) -> Guess | None:
        """Returns a guess of up to ``n_tokens`` tokens, at least 1; None if there is none.

        Args:
            request: a running request, all of whose tokens are known.
            n_tokens: how many tokens to guess at most, at least 1.
        """


class OwnText(Source):
    """Guesses what followed when the last tokens of a request came before in its prompt or answer.

    Args:
        sizes: lengths of endings to look for, ascending.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes

    def guess(self, request: Request, n_tokens: int) -> Guess | None:
        """Returns what followed the longest ending. O(tokens of the request)."""
        found = continue_text(request.known_key, self._sizes, n_tokens)
        return None if found is None else Guess("prompt", *found)


class CachedSequences(Source):
    """Guesses what follows all tokens of a request in the sequences that are cached.

    Args:
        tree: has the sequences.
        n_matched: what to say of the length of a match, which is that of the whole request.
    """

    def __init__(self, tree: RadixTree, n_matched: int) -> None:
        self._tree = tree
        self._n_matched = n_matched

    def guess(self, request: Request, n_tokens: int) -> Guess | None:
        """Returns what follows in computed pages of the request's namespace. O(edges after its lease + tokens)."""
        lease = request.blocks.lease
        if lease is None:
            return None
        tail = bytes(request.known_key[lease.n_tokens * TOKEN_BYTES :])
        tokens = self._tree.continuation(lease, tail, n_tokens)
        return Guess("tree", self._n_matched, tokens) if tokens else None


class LongestMatch(Source):
    """Asks sources in order until one has a long match; takes the longest, the first of equally long ones.

    A guess is cut before the first token that the request's constraint forbids, or that would end the output. If
    nothing is left of it, another one is taken.

    Args:
        sources: in order.
        sizes: lengths of endings that are looked for, ascending; a match of the middle one is long.
    """

    def __init__(self, sources: Sequence[Source], sizes: tuple[int, ...]) -> None:
        self._sources = sources
        self._n_enough = sizes[len(sizes) // 2]

    def guess(self, request: Request, n_tokens: int) -> Guess | None:
        """Returns the guess with the longest match. Costs what the sources asked cost, and mostly ``n_allowed``."""
        shorter: list[Guess] = []
        for source in self._sources:
            guess = source.guess(request, n_tokens)
            if guess is None:
                continue
            if guess.n_matched < self._n_enough:
                shorter.append(guess)
            elif allowed := _allowed(guess, request):
                return allowed
        shorter.sort(key=lambda guess: guess.n_matched, reverse=True)
        return next(filter(None, (_allowed(guess, request) for guess in shorter)), None)


class ForcedText(Source):
    """Guesses the text that a request's constraint forces, or what another source guesses if that has more tokens.

    Each guess of the other source begins with the forced text, too, because the constraint allows it; it may know
    better which tokens a model takes.

    Args:
        source: guesses only what constraints allow.
        n_matched: what to say of the length of a match.
    """

    def __init__(self, source: Source, n_matched: int) -> None:
        self._source = source
        self._n_matched = n_matched

    def guess(self, request: Request, n_tokens: int) -> Guess | None:
        """Returns the forced text or the longer guess. Costs what the other source costs, and ``forced``."""
        guess = self._source.guess(request, n_tokens)
        if request.constraint is None:
            return guess
        forced = _before_end(request.constraint.forced(n_tokens), request)
        if not forced or (guess is not None and len(guess.tokens) > len(forced)):
            return guess
        return Guess("grammar", self._n_matched, forced, _FORCED_PRIOR)


def _allowed(guess: Guess, request: Request) -> Guess | None:
    """Returns the tokens of a guess before the first one that is forbidden or would end the output; None if that
    leaves nothing."""
    tokens = _before_end(guess.tokens, request)
    if request.constraint is not None:
        tokens = tokens[: request.constraint.n_allowed(tokens) * TOKEN_BYTES]
    if len(tokens) == len(guess.tokens):
        return guess
    return guess._replace(tokens=tokens) if tokens else None


def _before_end(tokens: bytes, request: Request) -> bytes:
    """Returns the tokens before the first one that would end the output, or is a mark in place of a token.

    Takes 0.8 µs for 16 tokens.
    """
    ids, ends = memoryview(tokens).cast("i"), request.stop_token_ids
    if ends.isdisjoint(ids) and min(ids, default=0) >= 0:
        return tokens
    return tokens[: next(at for at, token in enumerate(ids) if token in ends or token < 0) * TOKEN_BYTES]
