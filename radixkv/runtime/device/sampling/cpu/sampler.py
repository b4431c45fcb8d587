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
from radixkv.runtime.device.sampling.cpu.draw import draw, draw_ordered, uniforms
from radixkv.runtime.device.sampling.cpu.logit_edits import Edits
from radixkv.runtime.device.sampling.cpu.logit_row import Listed, LogitRow
from radixkv.runtime.device.sampling.cpu.top_tokens import Shortlists
from radixkv.runtime.step.plan import RowSampling
from radixkv.wire import TokenLogprobs

_MIN_TEMPERATURE = 1e-5
"""Below it the likeliest token is taken: the others' weights would be zero in float32."""

_LARGEST_EXPONENT = 64.0
"""Weights up to e to this power and from its inverse on, and the sum of a vocabulary of them, are plain float32."""

_ALIGNMENT = 64
"""Bytes. Rows that begin at such an address are read alike, to the last bit."""

_SPARE = 1.5
"""As many times the wanted number of candidates are looked up where penalties may take some of them away."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token."""

    token: int
    logprobs: TokenLogprobs | None
    """Where asked for."""


@dataclass(slots=True)
class _Reading:
    """What is known of a row after it was read."""

    row: LogitRow
    token: int = -1
    """The chosen one, or -1 until it is drawn from"""
    kept: Listed | None = None
    """the likeliest."""
    log_total: float = 0.0
    """Logarithm of the sum of all weights, where log-probabilities are asked for."""


class Sampler:
    """Chooses tokens, and remembers what the slots' requests said, for penalties.

    A row is read while it lies in the processor's cache; what is left of it then, some hundred candidates at most
    where ``top_k`` or log-probabilities are asked for, is sorted and drawn from together with that of the others.
    Nothing of one row enters another: a result has the same bits whoever else is in the batch. The order is: bias,
    bans, penalties, temperature, ``top_k``, ``min_p``, ``top_p``; that of ``min_p`` and ``top_k`` makes no
    difference. Of equal logits ``top_k`` and greedy rows prefer the smaller id.
    """

    def __init__(self, n_batch_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._edits: list[Edits | None] = [None] * n_batch_slots
        self._scratch = torch.empty(vocab_size)
        self._weights: NDArray[np.float32] = self._scratch.numpy()

    def sample(
        self, logits: Tensor, batch_slots: Sequence[int], sampling: Sequence[RowSampling]
    ) -> list[Sampled | None]:
        """One token a row; None where the row is not finite, whose slot then keeps what it had.

        Args:
            logits: [rows, vocab] float32, contiguous; unchanged on return.
            slots: [rows], each once.
            sampling: [rows].

        Raises:
            DeviceError: token ids are outside the vocabulary, or penalties have no history.
        """
        with np.errstate(over="ignore"):  # differences of huge logits
            readings = [
                self._read(values, self._edits_of(batch_slot, row), row)
                for values, batch_slot, row in zip(logits.numpy(), batch_slots, sampling, strict=True)
            ]
            good = [(reading, row) for reading, row in zip(readings, sampling, strict=True) if reading is not None]
            _draw_listed([(reading, row) for reading, row in good if reading.kept is not None])
            asked = [(reading, row.n_logprobs) for reading, row in good if row.n_logprobs is not None]
            logprobs = iter(_logprobs([reading for reading, _ in asked], [n for _, n in asked]))
        sampled: list[Sampled | None] = []
        for reading, batch_slot, row in zip(readings, batch_slots, sampling, strict=True):
            if reading is None:
                sampled.append(None)
                continue
            edits = self._edits[batch_slot]
            if edits is not None and edits.counts_tokens:
                edits.count(reading.token)
            sampled.append(Sampled(reading.token, None if row.n_logprobs is None else next(logprobs)))
        return sampled

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
        readings = []
        with np.errstate(over="ignore"):
            for values, target in zip(logits.numpy(), targets.tolist(), strict=True):
                row = LogitRow(values, n_logprobs)
                if not row.is_finite:
                    return None
                readings.append(_Reading(row, target, log_total=self._log_total(row)))
        return _logprobs(readings, [n_logprobs] * len(readings))

    def _edits_of(self, batch_slot: int, sampling: RowSampling) -> Edits | None:
        """The slot's edits, brought up to date; those of another request are dropped."""
        edits = self._edits[batch_slot]
        if sampling.history is not None:
            edits = Edits(sampling, self._vocab_size)
        elif sampling.has_penalties:
            if edits is None or not edits.counts_tokens:
                raise DeviceError(f"slot {batch_slot} has penalties and no history; send one with its first row")
        elif not sampling.logit_bias and not sampling.banned:
            edits = None
        elif edits is None or edits.counts_tokens or not edits.has(sampling):
            edits = Edits(sampling, self._vocab_size)
        if edits is not None:
            edits.adopt(sampling)
        self._edits[batch_slot] = edits
        return edits

    def _read(self, values: NDArray[np.float32], edits: Edits | None, sampling: RowSampling) -> _Reading | None:
        """All that needs the whole row."""
        n_kept = self._n_kept(sampling)
        n_sought = n_kept if edits is None else math.ceil(_SPARE * n_kept)
        row = LogitRow(values, max(n_sought, sampling.n_logprobs or 0))
        if not row.is_finite:
            return None
        reading = _Reading(row)
        if sampling.n_logprobs is not None:
            reading.log_total = self._log_total(row)
        if n_kept:
            reading.kept = row.largest(n_kept, edits)
        else:
            reading.token = self._choose(row, edits, sampling)
        return reading

    def _n_kept(self, sampling: RowSampling) -> int:
        """How many of the likeliest tokens one is drawn from; 0 where it is the likeliest or could be any."""
        if _is_greedy(sampling) or sampling.top_k >= self._vocab_size:
            return 0
        return sampling.top_k

    def _choose(self, row: LogitRow, edits: Edits | None, sampling: RowSampling) -> int:
        with row.edited(edits) as values:
            best = row.best if edits is None else int(values.argmax())
            top = values[best]
            # Edits of huge logits may leave float32, and then there are no weights.
            if _is_greedy(sampling) or not math.isfinite(top):
                return best
            np.subtract(values, top, out=self._weights)
        if sampling.temperature != 1.0:
            self._scratch.mul_(1.0 / sampling.temperature)
        self._scratch.exp_()
        draws = uniforms(sampling.seed, sampling.index)
        return draw(self._weights, draws, min_p=sampling.min_p, top_p=sampling.top_p)

    def _log_total(self, row: LogitRow) -> float:
        """The logarithm of the sum of e to each logit."""
        top = float(row.values[row.best])
        if abs(top) > _LARGEST_EXPONENT:
            np.subtract(row.values, np.float32(top), out=self._weights)
            return top + math.log(self._scratch.exp_().sum())
        logits = torch.from_numpy(row.values)
        if logits.data_ptr() % _ALIGNMENT:
            self._scratch.copy_(logits)
            logits = self._scratch
        return math.log(torch.exp(logits, out=self._scratch).sum())


def _is_greedy(sampling: RowSampling) -> bool:
    return sampling.temperature < _MIN_TEMPERATURE or sampling.top_k == 1


def _draw_listed(rows: Sequence[tuple[_Reading, RowSampling]]) -> None:
    """Draws the tokens of rows that have ``kept``."""
    for some in Shortlists.sort([reading.kept for reading, _ in rows if reading.kept is not None]):
        group = [rows[place] for place in some.places]
        settings = [row for _, row in group]
        tops = some.logits[:, :1]
        # Edits of huge logits may leave float32, and then there are no weights but the likeliest's.
        distances = np.where(np.isfinite(tops), some.logits, -np.inf) - np.where(np.isfinite(tops), tops, 0.0)
        distances[:, 0] = 0.0
        places = draw_ordered(
            np.exp(distances / np.array([[row.temperature] for row in settings], dtype=np.float32)),
            np.array([next(uniforms(row.seed, row.index)) for row in settings]),
            top_k=np.array([row.top_k for row in settings]),
            min_p=np.array([row.min_p for row in settings], dtype=np.float32),
            top_p=np.array([row.top_p for row in settings]),
        )
        tokens = np.take_along_axis(some.ids, places[:, None], axis=1)[:, 0]
        for (reading, _), token in zip(group, tokens.tolist(), strict=True):
            reading.token = token


def _logprobs(readings: Sequence[_Reading], n_listed: Sequence[int]) -> list[TokenLogprobs]:
    """How likely their tokens were, each beside that many of the likeliest."""
    chosen = np.array([reading.row.values[reading.token] for reading in readings], dtype=np.float32)
    log_totals = np.array([reading.log_total for reading in readings])
    logprobs: dict[int, TokenLogprobs] = {}
    for some in Shortlists.sort([(reading.row.ids, reading.row.large) for reading in readings]):
        places = some.places
        larger = np.count_nonzero(some.logits > chosen[places, None], axis=1).tolist()
        top_ids = some.ids.astype("<i4")
        top_logprobs = (some.logits - log_totals[places, None]).astype("<f4")
        own = (chosen[places] - log_totals[places]).tolist()
        for i, place in enumerate(places):
            row, n = readings[place].row, min(n_listed[place], len(readings[place].row.values))
            logprobs[place] = TokenLogprobs(
                logprob=own[i],
                rank=1 + larger[i] if chosen[place] >= row.bound else row.rank(readings[place].token),
                top_ids=top_ids[i, :n].tobytes(),
                top_logprobs=top_logprobs[i, :n].tobytes(),
            )
    return [logprobs[place] for place in range(len(readings))]
