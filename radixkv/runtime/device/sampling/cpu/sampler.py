"""The CPU's sampler: chooses tokens from logits and reports their logprobs."""

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
from radixkv.runtime.device.sampling.cpu.logit_edits import LogitEdits
from radixkv.runtime.device.sampling.cpu.logit_row import Candidates, LogitRow
from radixkv.runtime.device.sampling.cpu.top_tokens import SortedCandidates
from radixkv.runtime.step.plan import RowSampling
from radixkv.wire import TokenLogprobs

_MIN_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: all weights but the largest would underflow to zero in float32."""

_MAX_EXPONENT = 64.0
"""For logits up to this magnitude, exp of the logits and its sum over a vocabulary fit into float32 unshifted."""

_ALIGNMENT = 64
"""Bytes. Sums over rows that begin at a multiple of this address have the same bits."""

_LOOKUP_FACTOR = 1.5
"""How many times the needed number of candidates to look up if penalties may drop some of them."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token."""

    token: int
    logprobs: TokenLogprobs | None
    """None if the row did not request logprobs."""


@dataclass(slots=True)
class _RowState:
    """Results of reading one row, which the batched part of sampling completes."""

    row: LogitRow
    token: int = -1
    """Chosen token; -1 until it is drawn from ``candidates``."""
    candidates: Candidates | None = None
    """Likeliest tokens after logit edits, to draw from; None if the token is chosen already."""
    logsumexp: float = 0.0
    """Log of the sum of exp of the original logits; set only if the row requests logprobs."""


class Sampler:
    """Samples tokens and counts each batch slot's output tokens for penalties.

    Each row is read completely while it is in the processor's cache. Its candidates, a few hundred at most with
    ``top_k`` or logprobs, are then sorted and drawn from together with those of other rows. A row's result has the
    same bits whichever rows are beside it.

    Settings apply in this order: bias, bans, penalties, temperature, ``top_k``, ``min_p``, ``top_p``. Swapping
    ``top_k`` and ``min_p`` would make no difference. Of equal logits, ``top_k`` and greedy rows prefer the smaller
    id.
    """

    def __init__(self, n_batch_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._edits: list[LogitEdits | None] = [None] * n_batch_slots
        self._scratch = torch.empty(vocab_size)
        self._weights: NDArray[np.float32] = self._scratch.numpy()

    def sample(
        self, logits: Tensor, batch_slots: Sequence[int], sampling: Sequence[RowSampling]
    ) -> list[SampledToken | None]:
        """Samples one token per row.

        Args:
            logits: [rows, vocab] float32, contiguous; edited in place and restored before returning.
            batch_slots: [rows], without duplicates.
            sampling: [rows].

        Returns:
            [rows]; None for rows whose logits are not finite, whose batch slots keep their token counts.

        Raises:
            DeviceError: token ids are outside the vocabulary, or penalties have no history.
        """
        with np.errstate(over="ignore"):  # differences of huge logits overflow
            states = [
                self._read(values, self._edits_of(batch_slot, row), row)
                for values, batch_slot, row in zip(logits.numpy(), batch_slots, sampling, strict=True)
            ]
            finite = [(state, row) for state, row in zip(states, sampling, strict=True) if state is not None]
            _draw_candidates([(state, row) for state, row in finite if state.candidates is not None])
            reported = [(state, row.n_logprobs) for state, row in finite if row.n_logprobs is not None]
            logprobs = iter(_logprobs([state for state, _ in reported], [n for _, n in reported]))
        sampled: list[SampledToken | None] = []
        for state, batch_slot, row in zip(states, batch_slots, sampling, strict=True):
            if state is None:
                sampled.append(None)
                continue
            edits = self._edits[batch_slot]
            if edits is not None and edits.counts_tokens:
                edits.count(state.token)
            sampled.append(SampledToken(state.token, None if row.n_logprobs is None else next(logprobs)))
        return sampled

    def score(self, logits: Tensor, targets: NDArray[np.integer], n_logprobs: int) -> list[TokenLogprobs] | None:
        """Returns the logprobs of given tokens, one per row of logits.

        Args:
            logits: [rows, vocab] float32, contiguous.
            targets: [rows], token ids.
            n_logprobs: number of likeliest tokens to report beside each target.

        Returns:
            [rows], or None if a row is not finite.

        Raises:
            DeviceError: a target is outside the vocabulary.
        """
        if len(targets) and not 0 <= targets.min() <= targets.max() < self._vocab_size:
            raise DeviceError(
                f"prompt logprobs of a token id that is not between 0 and {self._vocab_size - 1} "
                f"(ids from {targets.min()} to {targets.max()})"
            )
        states = []
        with np.errstate(over="ignore"):
            for values, target in zip(logits.numpy(), targets.tolist(), strict=True):
                row = LogitRow(values, n_logprobs)
                if not row.is_finite:
                    return None
                states.append(_RowState(row, target, logsumexp=self._logsumexp(row)))
        return _logprobs(states, [n_logprobs] * len(states))

    def _edits_of(self, batch_slot: int, sampling: RowSampling) -> LogitEdits | None:
        """Returns the batch slot's edits, updated for ``sampling``; edits of an earlier request are dropped."""
        edits = self._edits[batch_slot]
        if sampling.history is not None:
            edits = LogitEdits(sampling, self._vocab_size)
        elif sampling.has_penalties:
            if edits is None or not edits.counts_tokens:
                raise DeviceError(
                    f"batch slot {batch_slot} has penalties and no history; send one with its first row"
                )
        elif not sampling.logit_bias and not sampling.banned:
            edits = None
        elif edits is None or edits.counts_tokens or not edits.has_adopted(sampling):
            edits = LogitEdits(sampling, self._vocab_size)
        if edits is not None:
            edits.adopt(sampling)
        self._edits[batch_slot] = edits
        return edits

    def _read(
        self, values: NDArray[np.float32], edits: LogitEdits | None, sampling: RowSampling
    ) -> _RowState | None:
        """Does everything that needs the whole row; returns None if the row is not finite."""
        n_candidates = self._n_candidates(sampling)
        n_lookup = n_candidates if edits is None else math.ceil(_LOOKUP_FACTOR * n_candidates)
        row = LogitRow(values, max(n_lookup, sampling.n_logprobs or 0))
        if not row.is_finite:
            return None
        state = _RowState(row)
        if sampling.n_logprobs is not None:
            state.logsumexp = self._logsumexp(row)
        if n_candidates:
            state.candidates = row.largest(n_candidates, edits)
        else:
            state.token = self._choose(row, edits, sampling)
        return state

    def _n_candidates(self, sampling: RowSampling) -> int:
        """Returns the number of likeliest tokens to draw from; 0 for greedy rows and rows without ``top_k``."""
        if _is_greedy(sampling) or sampling.top_k >= self._vocab_size:
            return 0
        return sampling.top_k

    def _choose(self, row: LogitRow, edits: LogitEdits | None, sampling: RowSampling) -> int:
        """Returns the token of a row that is greedy or has no ``top_k``."""
        with row.edited(edits) as values:
            best = row.best if edits is None else int(values.argmax())
            top = values[best]
            # Edits of huge logits may overflow float32; weights are undefined then.
            if _is_greedy(sampling) or not math.isfinite(top):
                return best
            np.subtract(values, top, out=self._weights)
        if sampling.temperature != 1.0:
            self._scratch.mul_(1.0 / sampling.temperature)
        self._scratch.exp_()
        draws = uniforms(sampling.seed, sampling.index)
        return draw(self._weights, draws, min_p=sampling.min_p, top_p=sampling.top_p)

    def _logsumexp(self, row: LogitRow) -> float:
        """Returns the log of the sum of exp of all logits."""
        top = float(row.values[row.best])
        if abs(top) > _MAX_EXPONENT:
            np.subtract(row.values, np.float32(top), out=self._weights)
            return top + math.log(self._scratch.exp_().sum())
        logits = torch.from_numpy(row.values)
        if logits.data_ptr() % _ALIGNMENT:
            self._scratch.copy_(logits)
            logits = self._scratch
        return math.log(torch.exp(logits, out=self._scratch).sum())


def _is_greedy(sampling: RowSampling) -> bool:
    return sampling.temperature < _MIN_TEMPERATURE or sampling.top_k == 1


def _draw_candidates(rows: Sequence[tuple[_RowState, RowSampling]]) -> None:
    """Sets the tokens of rows that have ``candidates``."""
    for group in SortedCandidates.sort([state.candidates for state, _ in rows if state.candidates is not None]):
        group_rows = [rows[index] for index in group.indices]
        settings = [row for _, row in group_rows]
        tops = group.logits[:, :1]
        # Edits of huge logits may overflow float32; then only the likeliest token has a weight.
        distances = np.where(np.isfinite(tops), group.logits, -np.inf) - np.where(np.isfinite(tops), tops, 0.0)
        distances[:, 0] = 0.0
        columns = draw_ordered(
            np.exp(distances / np.array([[row.temperature] for row in settings], dtype=np.float32)),
            np.array([next(uniforms(row.seed, row.index)) for row in settings]),
            top_k=np.array([row.top_k for row in settings]),
            min_p=np.array([row.min_p for row in settings], dtype=np.float32),
            top_p=np.array([row.top_p for row in settings]),
        )
        tokens = np.take_along_axis(group.ids, columns[:, None], axis=1)[:, 0]
        for (state, _), token in zip(group_rows, tokens.tolist(), strict=True):
            state.token = token


def _logprobs(states: Sequence[_RowState], n_logprobs: Sequence[int]) -> list[TokenLogprobs]:
    """Returns the logprobs of the rows' tokens.

    Args:
        states: [rows], with token and logsumexp set.
        n_logprobs: [rows], number of likeliest tokens to report beside each token.
    """
    chosen = np.array([state.row.values[state.token] for state in states], dtype=np.float32)
    logsumexps = np.array([state.logsumexp for state in states])
    logprobs: dict[int, TokenLogprobs] = {}
    for group in SortedCandidates.sort([(state.row.ids, state.row.large) for state in states]):
        indices = group.indices
        n_larger = np.count_nonzero(group.logits > chosen[indices, None], axis=1).tolist()
        top_ids = group.ids.astype("<i4")
        top_logprobs = (group.logits - logsumexps[indices, None]).astype("<f4")
        chosen_logprobs = (chosen[indices] - logsumexps[indices]).tolist()
        for i, index in enumerate(indices):
            row, n = states[index].row, min(n_logprobs[index], len(states[index].row.values))
            logprobs[index] = TokenLogprobs(
                logprob=chosen_logprobs[i],
                rank=1 + n_larger[i] if chosen[index] >= row.bound else row.rank(states[index].token),
                top_ids=top_ids[i, :n].tobytes(),
                top_logprobs=top_logprobs[i, :n].tobytes(),
            )
    return [logprobs[index] for index in range(len(states))]
