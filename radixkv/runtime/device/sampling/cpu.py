"""The CPU's sampler: chooses tokens from logits and reports their logprobs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from radixkv.runtime.device.sampling.logit_edits import (
    MAX_LOGIT,
    MIN_REPETITION_PENALTY,
    TokenBiases,
    check_histories,
    has_edits,
    split_history,
)
from radixkv.runtime.device.sampling.row_sampling import check_targets, is_greedy, top_k_of, uniforms
from radixkv.runtime.step.plan import History, RowSampling
from radixkv.wire.messages import TokenLogprobs

_BLOCK = 32
"""Logits per block. Rows are padded with -inf to whole blocks, at least as long as a vector register: sums over
them then have the same bits whatever else is in the batch."""
_MAX_VALUES = 1 << 20
"""Most logits that are copied and read several times in one go, so that they stay in the processor's caches."""
_BYTE_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BYTE_LOGITS = np.where(_BYTE_BITS, np.float32(0.0), np.float32(-np.inf))
"""[256, 8]: what each byte of a mask adds to the logits of its eight tokens."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token."""

    token: int
    logprobs: TokenLogprobs | None
    """Logprobs of the token; None if the row did not request them."""


class Sampler:
    """Samples tokens and counts each batch slot's output tokens for penalties.

    ``row_sampling`` and ``logit_edits`` say what a row's settings mean. Every operation treats each row by itself,
    so a row's result has the same bits whichever rows are beside it.

    Memory: 8 MB, or two rows of logits where these are larger.
    """

    def __init__(self, n_batch_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        width = -(-vocab_size // _BLOCK) * _BLOCK
        self._workspace = torch.empty(2, max(1, _MAX_VALUES // width), width)
        """Kept, because fresh memory costs several times what is computed in it."""
        self._biases: list[TokenBiases | None] = [None] * n_batch_slots
        self._seen: list[_SeenTokens | None] = [None] * n_batch_slots

    def sample(
        self,
        logits: Tensor,
        batch_slots: Sequence[int],
        sampling: Sequence[RowSampling],
        masks: Sequence[NDArray[np.int32] | None] | None = None,
    ) -> list[SampledToken | None]:
        """Samples one token per row.

        Args:
            logits: [rows, vocab] float32, contiguous. Rows with biases, bans, penalties or masks are overwritten.
            batch_slots: [rows], without duplicates among rows with penalties.
            sampling: [rows].
            masks: [rows] of [ceil(vocab / 32)], as in ``TokenMasks``; None for rows, or for all, without one.

        Returns:
            [rows]; None for rows whose logits are not finite, whose batch slots keep their token counts.

        Raises:
            DeviceError: token ids are outside the vocabulary, all tokens are banned, or penalties have no history.
        """
        check_histories(batch_slots, sampling, [seen is not None for seen in self._seen])
        for batch_slot, settings in zip(batch_slots, sampling, strict=True):
            self._adopt(batch_slot, settings)
        tokens, is_finite = _likeliest(logits)
        finite = is_finite.nonzero()[:, 0].tolist()
        drawn = [row for row in finite if has_edits(sampling[row]) or not is_greedy(sampling[row])]
        top_ks = {row: top_k_of(sampling[row], self._vocab_size) for row in drawn}
        for chunk in self._chunks([row for row in drawn if top_ks[row]]):
            values = self._edited(logits, chunk, batch_slots, sampling, masks)
            tokens[chunk] = _draw_listed(values, [sampling[row] for row in chunk], [top_ks[row] for row in chunk])
        for chunk in self._chunks([row for row in drawn if not top_ks[row]]):
            values = self._edited(logits, chunk, batch_slots, sampling, masks)
            tokens[chunk] = _draw_unlisted(values, [sampling[row] for row in chunk], self._workspace)
        sampled: list[SampledToken | None] = [None] * len(sampling)
        chosen = tokens.tolist()
        for row in finite:
            sampled[row] = SampledToken(chosen[row], None)
            if sampling[row].has_penalties and (seen := self._seen[batch_slots[row]]) is not None:
                seen.add(chosen[row])
        reported = [(row, n) for row in finite if (n := sampling[row].n_logprobs) is not None]
        for row, logprobs in self._logprobs(logits, tokens, reported):
            sampled[row] = SampledToken(chosen[row], logprobs)
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
        check_targets(targets, self._vocab_size)
        _, is_finite = _likeliest(logits)
        if not is_finite.all():
            return None
        tokens = torch.from_numpy(targets.astype(np.int64))
        rows = [(row, n_logprobs) for row in range(len(logits))]
        return [logprobs for _, logprobs in self._logprobs(logits, tokens, rows)]

    def _chunks(self, rows: list[int]) -> Iterator[list[int]]:
        n = self._workspace.shape[1]
        return (rows[first : first + n] for first in range(0, len(rows), n))

    def _adopt(self, batch_slot: int, row: RowSampling) -> None:
        """Takes over history, biases and bans of a row, and drops those of the batch slot's earlier request."""
        if row.history is not None:
            self._seen[batch_slot] = _SeenTokens(row.history, self._vocab_size)
        elif not row.has_penalties:
            self._seen[batch_slot] = None
        biases = self._biases[batch_slot]
        if not row.logit_bias and not row.banned:
            self._biases[batch_slot] = None
        elif biases is None or not biases.is_of(row):
            self._biases[batch_slot] = TokenBiases.parse(row, self._vocab_size)

    def _edited(
        self,
        logits: Tensor,
        rows: Sequence[int],
        batch_slots: Sequence[int],
        sampling: Sequence[RowSampling],
        masks: Sequence[NDArray[np.int32] | None] | None,
    ) -> Tensor:
        """Returns the logits of rows after biases, bans, penalties and masks, in whole blocks.

        They are what ``_take`` returns. Where an edited row reports logprobs, they are a copy in the second
        workspace: logprobs are those of the original logits.
        """
        values = _take(logits, rows)
        edited = [(index, row) for index, row in enumerate(rows) if has_edits(sampling[row])]
        if any(sampling[row].n_logprobs is not None for _, row in edited):
            values = self._workspace[1, : len(rows)].copy_(values)
        for index, row in edited:
            if (biases := self._biases[batch_slots[row]]) is not None:
                values[index].index_add_(0, torch.from_numpy(biases.ids), torch.from_numpy(biases.values))
            if sampling[row].has_penalties and (seen := self._seen[batch_slots[row]]) is not None:
                seen.penalise(values[index], sampling[row])
            if masks is not None and (bits := masks[row]) is not None:
                values[index, : self._vocab_size] += _mask_logits(bits, self._vocab_size)
        return values

    def _logprobs(
        self, logits: Tensor, tokens: Tensor, rows: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[int, TokenLogprobs]]:
        """Yields rows and the logprobs of their tokens.

        Args:
            logits: [any, vocab].
            tokens: [any] int64, by row of ``logits``.
            rows: [n]: index of the row, and number of likeliest tokens to report.
        """
        n_listed = {row: min(n, self._vocab_size) for row, n in rows}
        for chunk in self._chunks([row for row, _ in rows]):
            values, chosen = _take(logits, chunk), tokens[chunk][:, None]
            logprobs = torch.log_softmax(values, -1, out=self._workspace[0, : len(chunk)])
            own = logprobs.gather(1, chosen)[:, 0].tolist()
            ids = _largest(values, max(n_listed[row] for row in chunk))
            top_ids, top_logprobs = ids.numpy().astype("<i4"), logprobs.gather(1, ids).numpy().astype("<f4")
            # Ones and zeros in float32, because sums of booleans take four times as long.
            n_larger = torch.gt(values, values.gather(1, chosen), out=logprobs).sum(-1)
            for index, (row, larger) in enumerate(zip(chunk, n_larger.tolist(), strict=True)):
                n = n_listed[row]
                yield (
                    row,
                    TokenLogprobs(
                        own[index], 1 + int(larger), top_ids[index, :n].tobytes(), top_logprobs[index, :n].tobytes()
                    ),
                )


class _SeenTokens:
    """The tokens of one request's prompt and output, which its penalties concern."""

    def __init__(self, history: History, vocab_size: int) -> None:
        prompt, output = split_history(history, vocab_size)
        self._ids, indices = torch.from_numpy(np.concatenate((prompt, output))).unique(return_inverse=True)
        self._n_outputs = torch.bincount(indices[len(prompt) :], minlength=len(self._ids))
        """[ids]: occurrences of each token in the output."""

    def add(self, token: int) -> None:
        """Counts an output token. O(tokens seen)."""
        index = (self._ids == token).nonzero()
        if len(index):
            self._n_outputs[index] += 1
        else:
            self._ids = torch.cat((self._ids, torch.tensor([token])))
            self._n_outputs = torch.cat((self._n_outputs, torch.tensor([1])))

    def penalise(self, values: Tensor, row: RowSampling) -> None:
        """Applies a row's penalties to its logits in place."""
        before = values[self._ids]
        repetition = max(row.repetition_penalty, MIN_REPETITION_PENALTY)
        after = torch.where(before > 0.0, before * (1.0 / repetition), before * repetition)
        after -= row.frequency_penalty * self._n_outputs + row.presence_penalty * (self._n_outputs > 0)
        values[self._ids] = torch.where(before == -math.inf, before, after.clamp_(-MAX_LOGIT, MAX_LOGIT))


def _mask_logits(bits: NDArray[np.int32], vocab_size: int) -> Tensor:
    """Returns what a mask adds to logits, [vocab]: 0 to allowed ones, -inf to others.

    Adding this takes a third of the time of ``masked_fill_``.
    """
    values = _BYTE_LOGITS.take(bits.astype("<i4", copy=False).view(np.uint8), axis=0)
    return torch.from_numpy(values.reshape(-1)[:vocab_size])


def _likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each row's likeliest token, [rows] int64, and whether all its logits are finite, [rows] bool.

    NumPy's argmax and torch's amin return a NaN if there is one. torch's argmax takes five times as long.
    """
    tokens = torch.from_numpy(logits.numpy().argmax(-1))
    return tokens, logits.gather(1, tokens[:, None])[:, 0].isfinite() & logits.amin(-1).isfinite()


def _take(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Returns rows, padded with -inf to whole blocks; a view where rows are consecutive and need no padding."""
    if rows[-1] - rows[0] == len(rows) - 1:
        values = logits[rows[0] : rows[-1] + 1]
    else:
        values = logits.index_select(0, torch.tensor(rows))
    rest = -logits.shape[1] % _BLOCK
    return functional.pad(values, (0, rest), value=-math.inf) if rest else values


def _draw_listed(values: Tensor, sampling: Sequence[RowSampling], top_ks: Sequence[int]) -> Tensor:
    """Returns a token of each row, [rows], drawn from its ``top_k`` likeliest, which are listed in order.

    Args:
        values: [rows, whole blocks], edited logits.
        sampling: [rows].
        top_ks: [rows], at least 1.
    """
    ids = _largest(values, max(top_ks))
    width = -(-ids.shape[1] // _BLOCK) * _BLOCK
    logits = torch.full((len(ids), width), -math.inf)
    logits[:, : ids.shape[1]] = values.gather(1, ids)
    logits[torch.arange(width) >= torch.tensor(top_ks)[:, None]] = -math.inf
    # A greedy row has one candidate, and perhaps a temperature of 0.
    temperatures = [1.0 if top_k == 1 else row.temperature for row, top_k in zip(sampling, top_ks, strict=True)]
    weights = _weights(logits, temperatures, torch.empty(2, *logits.shape))
    weights *= weights >= _column([row.min_p for row in sampling], torch.float32) * weights[:, :1]
    cumulative = weights.cumsum(-1)
    shares = _column([row.top_p for row in sampling]) * cumulative[:, -1:]
    weights *= cumulative - weights < shares
    first, _ = _uniforms(sampling, 0)
    return ids.gather(1, _index_above(weights, first))[:, 0]


def _draw_unlisted(values: Tensor, sampling: Sequence[RowSampling], workspace: Tensor) -> Tensor:
    """Returns a token of each row, [rows], drawn from all tokens, which are not sorted.

    Args:
        values: [rows, whole blocks], edited logits.
        sampling: [rows].
        workspace: [2, at least rows, whole blocks]; overwritten.
    """
    weights = _weights(values, [row.temperature for row in sampling], workspace)
    for row_weights, row in zip(weights, sampling, strict=True):
        if row.min_p > 0.0:
            floor = np.float32(row.min_p) * row_weights.amax().numpy()
            torch.threshold_(row_weights, float(np.nextafter(floor, np.float32(-1.0))), 0.0)
    tokens = _draw_once(weights, sampling, 0)
    for index, row in enumerate(sampling):
        if row.top_p < 1.0:
            tokens[index] = _reject(weights[index : index + 1], row, int(tokens[index]))
    return tokens


def _reject(weights: Tensor, row: RowSampling, token: int) -> int:
    """Returns a drawn token if ``top_p`` keeps it, else one that is drawn from the heavier ones and kept.

    A token is kept if the sum of all heavier ones does not reach the share. For many equal-sized weights and a
    share p this takes 1 + ln(1/p) rounds on average, each of which reads the weights twice.

    Args:
        weights: [1, whole blocks]; overwritten.
        row: its settings.
        token: drawn from ``weights``.
    """
    share = row.top_p * _block_sums(weights).sum(dtype=torch.float64)
    n_rounds = 1
    while True:
        torch.threshold_(weights, float(weights[0, token]), 0.0)
        if _block_sums(weights).sum(dtype=torch.float64) < share:
            return token
        token = int(_draw_once(weights, [row], n_rounds))
        n_rounds += 1


def _draw_once(weights: Tensor, sampling: Sequence[RowSampling], n_rounds: int) -> Tensor:
    """Draws a block of each row, then a token of that block; returns the tokens, [rows]."""
    first, second = _uniforms(sampling, n_rounds)
    blocks = _index_above(_block_sums(weights), first)
    inside = weights.unflatten(1, (-1, _BLOCK))[torch.arange(len(weights)), blocks[:, 0]]
    return (blocks * _BLOCK + _index_above(inside, second))[:, 0]


def _weights(logits: Tensor, temperatures: Sequence[float], workspace: Tensor) -> Tensor:
    """Returns the softmax of each row at its temperature, in the workspace, [2, at least rows, n]."""
    distances, weights = workspace[0, : len(logits)], workspace[1, : len(logits)]
    # The maximum is subtracted first, because a quotient could overflow.
    torch.sub(logits, logits.amax(-1, keepdim=True), out=distances)
    torch.softmax(distances.div_(_column(temperatures, torch.float32)), -1, out=weights)
    return weights


def _block_sums(weights: Tensor) -> Tensor:
    """Returns the sum of each block, [rows, blocks]."""
    sums: Tensor = weights.unflatten(1, (-1, _BLOCK)).sum(-1)
    return sums


def _index_above(weights: Tensor, uniform: Tensor) -> Tensor:
    """Returns where each row's cumulative weight exceeds a share in [0, 1) of its total, [rows, 1] each."""
    cumulative = weights.cumsum(-1)
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)


def _uniforms(sampling: Sequence[RowSampling], n_rounds: int) -> tuple[Tensor, Tensor]:
    """Returns two random numbers for each row, [rows, 1] float64 each."""
    first, second = zip(*[uniforms(row.seed, row.index, n_rounds) for row in sampling], strict=True)
    return _column(first), _column(second)


def _column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)[:, None]


def _largest(values: Tensor, n: int) -> Tensor:
    """Returns the ids of each row's ``n`` largest values in order, [rows, n]; of equal values the smaller id first.

    The n largest values are in the n blocks whose maxima come first in that order, so only these are read again.

    Args:
        values: [rows, whole blocks].
        n: at most the length of a row.
    """
    blocks = values.unflatten(1, (-1, _BLOCK))
    if n >= blocks.shape[1]:
        return _order(values, n)
    chosen = _order(blocks.amax(-1), n).sort(-1).values
    candidates = blocks[torch.arange(len(values))[:, None], chosen].flatten(1)
    indices = _order(candidates, n)
    return chosen.gather(1, indices // _BLOCK) * _BLOCK + indices % _BLOCK


def _order(values: Tensor, n: int) -> Tensor:
    """Returns the indices of each row's ``n`` largest values in order; of equal values the smaller index first.

    ``topk`` leaves the order of equal values open, so it gets distinct integers: the bits of a value, mapped to an
    integer of the same order, then its index.
    """
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    return keys.sub_(torch.arange(values.shape[1])).topk(n).indices
