"""The policy of beam search: which continuations of a prompt go on, which are finished, and when the search ends.

It knows tokens and logprobs only. ``beams/group.py`` gives each beam a request. The rule is that of
Transformers' ``generate`` with ``early_stopping=False``, see docs/decisions/0044-beams.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire.messages import TokenLogprobs


class Successor(NamedTuple):
    """A beam of the next step: one of the last step's, with one more token."""

    parent: int
    """Index of the beam that it continues."""
    token: int


class FinishedBeam(NamedTuple):
    """An answer of a search."""

    score: float
    """``logprob / n_tokens ** length_penalty``."""
    logprob: float
    """Sum of the logprobs of its tokens."""
    tokens: bytes
    """Little-endian int32; with the end-of-sequence token, if it ends with one."""
    finish_reason: str
    """``stop`` or ``length``."""


class _Beam(NamedTuple):
    logprob: float
    tokens: bytes


class BeamSearch:
    """The beams of one prompt. At first there is one, without tokens; after each step there are ``width``.

    Args:
        width: number of beams, and of answers; with the number of ``eos_token_ids`` at most the vocabulary.
        max_tokens: maximum number of tokens of an answer.
        length_penalty: exponent of the length in the score; above 0 it favours longer answers.
        eos_token_ids: tokens that end an answer.
    """

    def __init__(
        self,
        width: int,
        max_tokens: int,
        *,
        length_penalty: float = 1.0,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.width = width
        self.finished: list[FinishedBeam] = []
        """The best finished answers, the best first; ``width`` of them when the search has ended."""
        self.is_ended = False
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._eos_token_ids = eos_token_ids
        self._beams = [_Beam(0.0, b"")]
        """The best first."""
        self._n_tokens = 0
        """Tokens of each beam."""

    @property
    def n_candidates(self) -> int:
        """How many of a beam's likeliest next tokens ``advance`` needs: ``width`` that go on, whatever ends."""
        return self.width + len(self._eos_token_ids)

    def advance(self, candidates: Sequence[TokenLogprobs]) -> list[Successor]:
        """Takes the beams' likeliest next tokens; returns the beams of the next step, the best first.

        Continuations that end are finished if they are among the best ``width`` of all. The search has ended when
        the best that goes on would not be among the finished answers if it ended now, or at ``max_tokens``. Then
        none goes on. O(n · log n) for n = width · ``n_candidates``, and a copy of the tokens of each beam.

        Args:
            candidates: for each beam, the ``n_candidates`` likeliest tokens.
        """
        ids = np.frombuffer(b"".join([one.top_ids for one in candidates]), dtype="<i4")
        logprobs = np.frombuffer(b"".join([one.top_logprobs for one in candidates]), dtype="<f4")
        n_listed = len(ids) // len(candidates)
        totals = np.repeat([beam.logprob for beam in self._beams], n_listed) + logprobs
        order = np.argsort(-totals, kind="stable")
        self._n_tokens += 1
        is_last = self._n_tokens == self._max_tokens
        chosen: list[Successor] = []
        beams: list[_Beam] = []
        for rank, index in enumerate(order[: self.width if is_last else None].tolist()):
            parent, token, logprob = index // n_listed, int(ids[index]), float(totals[index])
            tokens = self._beams[parent].tokens + token.to_bytes(TOKEN_BYTES, "little")
            is_eos = token in self._eos_token_ids
            if not (is_eos or is_last):
                chosen.append(Successor(parent, token))
                beams.append(_Beam(logprob, tokens))
                if len(chosen) == self.width:
                    break
            elif rank < self.width:
                self._finish(logprob, tokens, "stop" if is_eos else "length")
        self._beams = beams
        is_full = len(self.finished) == self.width
        self.is_ended = is_last or (is_full and self._score(beams[0].logprob) <= self.finished[-1].score)
        return [] if self.is_ended else chosen

    def _score(self, logprob: float) -> float:
        """Returns the score of a beam of this step."""
        length: float = self._n_tokens**self._length_penalty
        return logprob / length

    def _finish(self, logprob: float, tokens: bytes, reason: str) -> None:
        self.finished.append(FinishedBeam(self._score(logprob), logprob, tokens, reason))
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[self.width :]
