"""What the study's requests consist of: runs of token ids, of which equal ones stand for equal KV."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Segment(NamedTuple):
    """Consecutive token ids, ``first .. first + n_tokens - 1``, that no other segment has.

    Wherever a segment stands, the same segments stand before it: an id tells a token and all that precedes it, and
    with that the KV.
    """

    first: int
    n_tokens: int

    def tokens(self) -> array[int]:
        """The ids, int32."""
        return array("i", range(self.first, self.first + self.n_tokens))


class Segments:
    """Gives out segments that have no token id in common."""

    def __init__(self) -> None:
        self._n_tokens = 0

    def new(self, n_tokens: int) -> Segment:
        """The next one."""
        segment = Segment(self._n_tokens, n_tokens)
        self._n_tokens += n_tokens
        return segment


@dataclass(frozen=True, eq=False)
class Sequence:
    """A prompt and one answer to it."""

    prompt: tuple[Segment, ...]
    answer: Segment

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return sum(segment.n_tokens for segment in self.prompt)

    @property
    def n_stored(self) -> int:
        """Tokens whose KV is kept in the end: all but the answer's last, which nothing attends to."""
        return self.n_prompt + self.answer.n_tokens - 1


class Turn(NamedTuple):
    """A prompt and its answers, which are asked for together."""

    sequences: tuple[Sequence, ...]


Conversation = tuple[Turn, ...]
"""Each turn is asked once the one before is answered."""


def n_distinct(stored: Iterable[tuple[Sequence, int]]) -> int:
    """How many different tokens, with what precedes them, the beginnings of sequences hold. O(segments)."""
    longest: dict[int, int] = {}
    for sequence, n_tokens in stored:
        for segment in (*sequence.prompt, sequence.answer):
            n_here = min(n_tokens, segment.n_tokens)
            if n_here > longest.get(segment.first, 0):
                longest[segment.first] = n_here
            n_tokens -= n_here
            if not n_tokens:
                break
    return sum(longest.values())
