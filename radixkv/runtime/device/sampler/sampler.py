"""Logits -> tokens, and how likely they were."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.errors import DeviceError
from radixkv.runtime.device.sampler.draw import draw, draw_ordered, uniforms
from radixkv.runtime.device.sampler.edits import Edits
from radixkv.runtime.device.sampler.row import LogitRow
from radixkv.runtime.plan import RowSampling
from radixkv.wire import TokenLogprobs

_LEAST_TEMPERATURE = 1e-5
"""Below it the likeliest token is taken: the others' weights would be zero in float32."""

_SPARE = 2
"""As many times the wanted number of candidates are looked up where penalties may take some of them away."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token."""

    token: int
    logprobs: TokenLogprobs | None
    """Where asked for."""


class Sampler:
    """Chooses tokens row by row, and remembers what the slots' requests said, for penalties.

    A row is read while it lies in the processor's cache, and nothing of one row enters another: a result has the
    same bits whoever else is in the batch. The order is: bias, bans, penalties, temperature, ``top_k``, ``min_p``,
    ``top_p``; that of ``min_p`` and ``top_k`` makes no difference. Of equal logits ``top_k`` and greedy rows prefer
    the smaller id.
    """

    def __init__(self, n_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._edits: list[Edits | None] = [None] * n_slots
        self._scratch = torch.empty(vocab_size)
        self._weights: NDArray[np.float32] = self._scratch.numpy()

    def sample(self, logits: Tensor, slots: Sequence[int], sampling: Sequence[RowSampling]) -> list[Sampled | None]:
        """One token a row; None where the row is not finite, whose slot then keeps what it had.

        Args:
            logits: [rows, vocab] float32, contiguous; unchanged on return.
            slots: [rows], each once.
            sampling: [rows].

        Raises:
            DeviceError: token ids are outside the vocabulary, or penalties have no history.
        """
        with np.errstate(over="ignore"):  # differences of huge logits
            return [
                self._sample(values, self._edits_of(slot, row), row)
                for values, slot, row in zip(logits.numpy(), slots, sampling, strict=True)
            ]

    def score(self, logits: Tensor, targets: NDArray[np.integer], n_logprobs: int) -> list[TokenLogprobs] | None:
        """How likely ``targets`` were, one a row of logits; None if a row is not finite.

        Args:
            logits: [rows, vocab] float32, contiguous.
            targets: [rows].

        Raises:
            DeviceError: a target is outside the vocabulary.
        """
        if len(targets) and not 0 <= targets.min() <= targets.max() < self._vocab_size:
            raise DeviceError(f"a token to score is not between 0 and {self._vocab_size - 1}")
        scores = []
        with np.errstate(over="ignore"):
            for values, target in zip(logits.numpy(), targets.tolist(), strict=True):
                row = LogitRow.read(values, n_logprobs)
                if not row.is_finite:
                    return None
                scores.append(self._logprobs(row, target, n_logprobs))
        return scores

    def _edits_of(self, slot: int, sampling: RowSampling) -> Edits | None:
        """The slot's edits, brought up to date; those of another request are dropped."""
        edits = self._edits[slot]
        if sampling.history is not None:
            edits = Edits(sampling, self._vocab_size)
        elif sampling.has_penalties:
            if edits is None or not edits.counts_tokens:
                raise DeviceError(f"slot {slot} has penalties and no history; send one with its first row")
        elif not sampling.logit_bias and not sampling.banned:
            edits = None
        elif edits is None or edits.counts_tokens or not edits.has(sampling):
            edits = Edits(sampling, self._vocab_size)
        if edits is not None:
            edits.adopt(sampling)
        self._edits[slot] = edits
        return edits

    def _sample(self, values: NDArray[np.float32], edits: Edits | None, sampling: RowSampling) -> Sampled | None:
        n_kept = self._n_kept(sampling)
        n_sought = n_kept if edits is None else _SPARE * n_kept
        row = LogitRow.read(values, max(n_sought, sampling.n_logprobs or 0))
        if not row.is_finite:
            return None
        if edits is None:
            token = self._choose(row, n_kept, sampling)
        else:
            with row.edited(edits) as edited:
                token = self._choose(edited, n_kept, sampling)
            if edits.counts_tokens:
                edits.count(token)
        n_logprobs = sampling.n_logprobs
        return Sampled(token, None if n_logprobs is None else self._logprobs(row, token, n_logprobs))

    def _n_kept(self, sampling: RowSampling) -> int:
        """How many of the likeliest tokens it may be; 0 for all."""
        if sampling.temperature < _LEAST_TEMPERATURE or sampling.top_k >= self._vocab_size:
            return 0
        return sampling.top_k

    def _choose(self, row: LogitRow, n_kept: int, sampling: RowSampling) -> int:
        if sampling.temperature < _LEAST_TEMPERATURE or n_kept == 1:
            return row.best
        draws, top = uniforms(sampling.seed, sampling.index), row.values[row.best]
        if not math.isfinite(top):  # edits of huge logits may leave float32, and then there are no weights
            return row.best
        if n_kept:
            kept = row.largest(n_kept)
            weights = np.exp((row.values[kept] - top) / np.float32(sampling.temperature))
            return int(kept[draw_ordered(weights, draws, min_p=sampling.min_p, top_p=sampling.top_p)])
        np.subtract(row.values, top, out=self._weights)
        if sampling.temperature != 1.0:
            self._scratch.mul_(1.0 / sampling.temperature)
        self._scratch.exp_()
        return draw(self._weights, draws, min_p=sampling.min_p, top_p=sampling.top_p)

    def _logprobs(self, row: LogitRow, token: int, n: int) -> TokenLogprobs:
        top = row.values[row.best]
        np.subtract(row.values, top, out=self._weights)
        log_total = float(top) + math.log(self._scratch.exp_().sum())
        listed = row.largest(n)
        return TokenLogprobs(
            logprob=float(row.values[token]) - log_total,
            rank=row.rank(token),
            top_ids=listed.astype("<i4").tobytes(),
            top_logprobs=(row.values[listed] - log_total).astype("<f4").tobytes(),
        )
