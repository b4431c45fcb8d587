"""How likely a guess is right, by its kind."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

_DECAY = 31 / 32
"""Weight of what was learned before, each time that a guess of the kind is compared."""
PRIOR = 0.5, 0.8
"""Chances, before any comparison, that a guess's first token is right, and that a later one is after right ones."""
_PRIOR_WEIGHT = 2.0
"""The prior counts as much as so many comparisons."""


@dataclass(slots=True)
class _Kind:
    """Decayed counts of one kind of guess."""

    n_first: float = 0.0
    n_first_right: float = 0.0
    n_later: float = 0.0
    n_later_right: float = 0.0


class Acceptance:
    """Learns how likely the tokens of a guess are right.

    The first token of a guess has a chance of its own, which says whether the place was the right one. Each later
    one has another, if those before it are right. O(1) for a token.
    """

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}

    def chances(self, kind: Hashable, n_tokens: int, prior: tuple[float, float] = PRIOR) -> list[float]:
        """Returns for each of a guess's first tokens the chance that it and all before it are right.

        Args:
            kind: of the guess.
            n_tokens: of the guess.
            prior: what ``PRIOR`` is of most kinds.
        """
        counts = self._kinds.get(kind) or _Kind()
        first = (counts.n_first_right + prior[0] * _PRIOR_WEIGHT) / (counts.n_first + _PRIOR_WEIGHT)
        later = (counts.n_later_right + prior[1] * _PRIOR_WEIGHT) / (counts.n_later + _PRIOR_WEIGHT)
        return [first * later**index for index in range(n_tokens)]

    def learn(self, kind: Hashable, n_right: int, n_compared: int) -> None:
        """Learns from a guess.

        Args:
            kind: of the guess.
            n_right: first tokens that were right.
            n_compared: tokens up to the first one that was wrong, or that could be compared; at least 1.
        """
        counts = self._kinds.setdefault(kind, _Kind())
        counts.n_first = counts.n_first * _DECAY + 1
        counts.n_first_right = counts.n_first_right * _DECAY + (n_right > 0)
        if n_compared > 1:
            counts.n_later = counts.n_later * _DECAY + n_compared - 1
            counts.n_later_right = counts.n_later_right * _DECAY + n_right - 1
