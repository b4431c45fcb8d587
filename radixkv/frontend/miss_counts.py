"""Counts of cache misses by the place in the prompts where the matches end, in bounded memory."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from radixkv.wire.messages import CacheMiss, Done

MISS_REASONS = (
    "differs",
    "evicted",
    "never_seen",
    "evicted_or_never_seen",
    "other_namespace",
    "invocation",
    "no_state",
    "not_read",
)
"""The reasons of ``CacheMiss``."""
MAX_PLACES = 256
"""Most places that are counted; a new one takes the room of the one with the fewest lost tokens."""
_MAX_POSITIONS = 16
"""Most positions of first differences that are counted at a place."""
_MIN_SHARE = 1 / 8
"""Positions with a smaller share of a place's lost tokens are chance: two nonces may begin with equal tokens."""


@dataclass(slots=True)
class MissesOfReason:
    """Misses for the same reason, wherever the matches end."""

    n_requests: int = 0
    n_lost: int = 0
    """Prompt tokens that were computed."""


@dataclass(slots=True)
class MissesAtPosition:
    """Misses whose prompts differ from the cache at the same position of the same text."""

    example: CacheMiss
    """The latest of them."""
    n_lost: int = 0
    """Prompt tokens that were computed."""


@dataclass(slots=True)
class MissesAtPlace:
    """Misses for the same reason; for some reasons, only those whose matches end after the same pages of text."""

    reason: str
    has_place: bool
    """Whether all these misses follow one text, after which their prompts differ from the cache."""
    n_requests: int = 0
    n_lost: int = 0
    """Prompt tokens that were computed."""
    n_uncertain: int = 0
    """Most tokens that may have been lost here before the place was counted."""
    positions: dict[int | None, MissesAtPosition] = field(default_factory=dict)

    @property
    def example(self) -> CacheMiss:
        """A miss at the earliest position where a good part of the misses differ."""
        frequent = [at for at in self.positions.values() if at.n_lost >= _MIN_SHARE * self.n_lost]
        return min(frequent or self.positions.values(), key=lambda at: at.example.first_difference or 0).example


class MissCounts:
    """Counts the prompt tokens of ended requests, and where those that were not cached were lost.

    The counts of a place are exact from the request on with which it began to be counted. Every place that has lost
    more than ``1 / MAX_PLACES`` of all lost tokens is among those that are counted.
    """

    def __init__(self) -> None:
        self.n_requests = 0
        self.n_prompt = 0
        """Prompt tokens."""
        self.n_lost = 0
        """Prompt tokens that were computed."""
        self.by_reason = {reason: MissesOfReason() for reason in MISS_REASONS}
        """Exact, unlike the places."""
        self._places: dict[Hashable, MissesAtPlace] = {}

    def add(self, done: Done) -> None:
        """Counts a request. O(1), and O(``MAX_PLACES``) for a miss at a new place."""
        if not done.n_output_tokens and done.finish_reason != "stop":
            return  # it was cancelled before its prompt was computed; prompts without answers stop at their end
        self.n_requests += 1
        self.n_prompt += done.n_prompt_tokens
        n_lost = done.n_prompt_tokens - done.cache_use.n_cached
        self.n_lost += n_lost
        if done.miss is None:
            return
        of_reason = self.by_reason.setdefault(_counted_reason(done.miss), MissesOfReason())
        of_reason.n_requests += 1
        of_reason.n_lost += n_lost
        place = self._place(done.miss)
        place.n_requests += 1
        place.n_lost += n_lost
        position = done.miss.first_difference
        if position in place.positions or len(place.positions) < _MAX_POSITIONS:
            at = place.positions.setdefault(position, MissesAtPosition(done.miss))
            at.example = done.miss
            at.n_lost += n_lost

    def places(self) -> list[MissesAtPlace]:
        """Returns the places, the one with the most lost tokens first. O(``MAX_PLACES``)."""
        return sorted(self._places.values(), key=lambda place: place.n_lost, reverse=True)

    def _place(self, miss: CacheMiss) -> MissesAtPlace:
        reason = _counted_reason(miss)
        # The place matters only where prompts differ; all new texts count as one place.
        has_place = reason == "differs" or (
            reason == "evicted_or_never_seen" and miss.first_difference is not None and not miss.is_new
        )
        key = (reason, miss.n_matched, miss.place) if has_place else (reason, miss.is_other_adapter)
        place = self._places.get(key)
        if place is None:
            place = MissesAtPlace(reason, has_place)
            if len(self._places) == MAX_PLACES:
                least = min(self._places, key=lambda other: self._rank(self._places[other]))
                place.n_uncertain = self._rank(self._places.pop(least))
            self._places[key] = place
        return place

    def _rank(self, place: MissesAtPlace) -> int:
        return place.n_lost + place.n_uncertain


class MissRecord:
    """Counts misses since the start, and those since they were last asked for."""

    def __init__(self) -> None:
        self.total = MissCounts()
        self._recent = MissCounts()

    def add(self, done: Done) -> None:
        """Counts a request. Costs what ``MissCounts.add`` does."""
        self.total.add(done)
        self._recent.add(done)

    def take_recent(self) -> MissCounts:
        """Returns the counts of the requests since the last call."""
        recent, self._recent = self._recent, MissCounts()
        return recent


def _counted_reason(miss: CacheMiss) -> str:
    """Returns the reason under which a miss is counted: ``never_seen`` for a prompt that differs and then is new.

    No other prompt would avoid such a miss. ``differs`` stays for prompts that come back to the cached text.
    """
    return "never_seen" if miss.reason == "differs" and miss.is_new else miss.reason
