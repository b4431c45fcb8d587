"""The answers of a replay: how long each is, and which of its tokens later prompts send back."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from radixkv.errors import ConfigError
from radixkv.lab.simulator.recording import Recording
from radixkv.lab.simulator.traffic import TokenTraffic, Traffic
from radixkv.tree.node import TOKEN_BYTES

MAX_ANSWER_TOKENS = (1 << 30) - 1
"""Most tokens of all answers."""
_FIRST_FILLER = 1 << 30
"""The first of the tokens that no prompt has; each of them is in one answer only."""
END = (1 << 31) - 1
"""The token that ends an answer. It is never cached: the last token of an answer is not computed."""
_MAX_CANDIDATES = 64
"""How many prompts are searched for one that continues a given prompt."""


class Answers(Protocol):
    """The answers of a replay's prompts."""

    lengths: Sequence[int]
    """Tokens of each prompt's answer, at least 1."""
    are_limited: bool
    """Whether ``max_tokens`` ends each answer; if not, its last token does, and nobody knows its length before."""

    def symbols(self, index: int) -> bytes:
        """Returns the tokens of a prompt's answer, little-endian int32."""
        ...


class RecordedAnswers:
    """Tokens of answers of known lengths.

    Where a later prompt begins with a prompt, what follows there is the prompt's answer: the next turn of a chat
    sends it back. All other tokens of answers are new, and no prompt has them.

    Args:
        traffic: the prompts; each symbol is one token.
        lengths: tokens of each prompt's answer, at least 1.
        are_limited: whether ``max_tokens`` ends each answer, and not its last token.
    """

    def __init__(self, traffic: Traffic, lengths: Sequence[int], *, are_limited: bool = False) -> None:
        self.lengths = lengths
        self.are_limited = are_limited
        self._traffic = traffic
        self._starts = [0, *accumulate(lengths)]
        assert self._starts[-1] <= MAX_ANSWER_TOKENS, "each has a token of its own"
        # A trace of blocks does not tell the tokens of answers, and its symbols are made anew each time.
        has_tokens = isinstance(traffic, TokenTraffic)
        prompts = [traffic.symbols(index) for index in range(len(lengths) if has_tokens else 0)]
        self._order = sorted(range(len(prompts)), key=lambda index: (prompts[index], index))
        self._sorted = [prompts[index] for index in self._order]

    def symbols(self, index: int) -> bytes:
        """Returns the tokens of a prompt's answer, little-endian int32. O(tokens)."""
        length, prompt = self.lengths[index], self._traffic.symbols(index)
        first = _FIRST_FILLER + self._starts[index]
        filler = array("i", range(first, first + length)).tobytes()
        place = bisect_left(self._sorted, prompt)
        for other in range(place, min(place + _MAX_CANDIDATES, len(self._order))):
            following = self._sorted[other]
            if not following.startswith(prompt):
                break
            if self._order[other] > index and len(following) > len(prompt):
                sent_back = following[len(prompt) : len(prompt) + length * TOKEN_BYTES]
                return sent_back + filler[len(sent_back) :]
        return filler


def recorded_answers(recording: Recording, output_len: int | None) -> RecordedAnswers | None:
    """Returns the answers of a recording; None if neither it nor ``output_len`` says how long they are.

    A recorded answer ends with its last token. ``output_len`` is the ``max_tokens`` of each request, which ends it.

    Raises:
        ConfigError: both say it, or there are too many tokens.
    """
    lengths = recording.answer_tokens
    if lengths is not None and output_len is not None:
        raise ConfigError(f"{recording.name} says how long its answers are; leave output_len {output_len} out")
    if lengths is None and output_len is not None:
        lengths = [output_len] * len(recording.traffic.n_tokens)
    if lengths is not None and sum(lengths) > MAX_ANSWER_TOKENS:
        raise ConfigError(
            f"the answers of {recording.name} have {sum(lengths):,} tokens, more than {MAX_ANSWER_TOKENS:,}; "
            "replay a part of the file, or shorter answers"
        )
    is_limit = output_len is not None
    return None if lengths is None else RecordedAnswers(recording.traffic, lengths, are_limited=is_limit)
