"""What requests do to their logits before a token is chosen: biases, bans and penalties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.errors import DeviceError
from radixkv.runtime.device.sampling.cuda.logit_edit_kernels import count_tokens, edit_rows, edit_tokens
from radixkv.runtime.device.transfer_cuda import to_device
from radixkv.runtime.step.plan import RowSampling

LOT = 128
"""Rows that are edited at a time."""
_TOKEN = np.dtype("<i4")
_IN_PROMPT = -(1 << 15)
"""The sign of a token's number; the rest counts how often it is in the answer,"""
_MAX_COUNT = (1 << 15) - 1
"""at most up to here."""
_MIN_REPETITION_PENALTY = 1e-30
"""With less, logits leave float32; the order of tokens is the same."""


def has_edits(sampling: RowSampling) -> bool:
    """Whether the choice is not made from the logits as they are."""
    return sampling.has_penalties or bool(sampling.logit_bias) or bool(sampling.banned)


@dataclass(frozen=True)
class _Listed:
    """Biases and bans of a slot."""

    sampling: RowSampling
    entries: Tensor
    """[2, m] int32 on the device: each token once, and the bits of its bias."""

    def fits(self, sampling: RowSampling) -> bool:
        """Whether they are of the same objects."""
        return self.sampling.logit_bias is sampling.logit_bias and self.sampling.banned is sampling.banned


class Edits:
    """The slots' histories, and edited copies of logits.

    Memory, from the start on: ``2 * max_rows * vocab_size`` bytes for the histories, and four for each logit of
    ``LOT`` rows.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._counts = torch.zeros(max_rows, vocab_size, dtype=torch.int16, device=device)
        self._edited = torch.zeros(min(LOT, max_rows), vocab_size, dtype=torch.float32, device=device)
        self._has_history = [False] * max_rows
        self._listed: list[_Listed | None] = [None] * max_rows

    def forget(self) -> None:
        """All slots are as new."""
        self._has_history = [False] * len(self._has_history)
        self._listed = [None] * len(self._listed)

    def adopt(self, batch_slots: Sequence[int], sampling: Sequence[RowSampling]) -> None:
        """Takes over histories, biases and bans; those of a slot's former request are forgotten.

        Raises:
            DeviceError: token ids are outside the vocabulary, all of it is banned, or penalties have no history.
                Then no history has changed.
        """
        histories, has_history = [], [row.history is not None or row.has_penalties for row in sampling]
        for batch_slot, row in zip(batch_slots, sampling, strict=True):
            if row.history is not None:
                tokens = np.frombuffer(row.history.tokens, _TOKEN)
                self._check(tokens)
                histories.append((batch_slot, tokens, row.history.n_prompt))
            elif row.has_penalties and not self._has_history[batch_slot]:
                raise DeviceError(f"slot {batch_slot} has penalties and no history; send one with its first row")
            self._adopt_lists(batch_slot, row)
        for batch_slot, has in zip(batch_slots, has_history, strict=True):
            self._has_history[batch_slot] = has
        if histories:
            self._fill(histories)

    def apply(
        self, logits: Tensor, rows: Sequence[int], batch_slots: Sequence[int], some: Sequence[RowSampling]
    ) -> Tensor:
        """A float32 copy of up to ``LOT`` rows after bias, bans and penalties, which the next call writes again.

        Nothing in it is NaN or inf, and only what is banned is -inf, if ``logits`` are finite.

        Args:
            logits: [any, vocab], any float dtype.
            rows: [n], which of them.
            slots: [n], theirs, as adopted.
            some: [n].

        Returns:
            [n, vocab].
        """
        places = np.empty((3, len(rows)), dtype=np.int32)
        places[:] = rows, batch_slots, [row.has_penalties for row in some]
        repetition = np.maximum([row.repetition_penalty for row in some], _MIN_REPETITION_PENALTY)
        penalties = np.empty((4, len(rows)), dtype=np.float32)
        penalties[:] = (
            repetition,
            1.0 / repetition,
            [row.frequency_penalty for row in some],
            [row.presence_penalty for row in some],
        )
        sent = to_device(np.concatenate((places, penalties.view(np.int32))), self._device)
        edited = self._edited[: len(rows)]
        edit_rows(logits, self._counts, sent[:3], sent[3:].view(torch.float32), edited)
        found = [
            (place, listed)
            for place, batch_slot in enumerate(batch_slots)
            if (listed := self._listed[batch_slot]) is not None
        ]
        if found:
            sizes = [listed.entries.shape[1] for _, listed in found]
            addresses = [listed.entries.data_ptr() for _, listed in found]
            lists = to_device(np.array((addresses, sizes, [place for place, _ in found])), self._device)
            edit_tokens(logits, self._counts, sent[:3], sent[3:].view(torch.float32), lists, max(sizes), edited)
        return edited

    def count(self, batch_slots: Sequence[int], rows: Sequence[int], tokens: Tensor, finite: Tensor) -> None:
        """``tokens[rows]`` came into the answers of ``batch_slots``, where the row is finite.

        Args:
            tokens: [any] int32.
            finite: [any] int32, 0 or 1.
        """
        count_tokens(
            self._counts, to_device(np.array((batch_slots, rows), dtype=np.int32), self._device), tokens, finite
        )

    def _adopt_lists(self, batch_slot: int, row: RowSampling) -> None:
        found = self._listed[batch_slot]
        if found is not None and found.fits(row):
            return
        if not row.logit_bias and not row.banned:
            self._listed[batch_slot] = None
            return
        if len(set(row.banned)) == self._vocab_size:
            raise DeviceError(f"all {self._vocab_size} tokens are banned")
        biases: dict[int, float] = {}
        for token, bias in row.logit_bias:
            biases[token] = biases.get(token, 0.0) + bias
        biases.update(dict.fromkeys(row.banned, -np.inf))
        ids = np.array(list(biases), dtype=np.int64)
        self._check(ids)
        bits = np.array(list(biases.values()), dtype=np.float32).view(np.int32)
        self._listed[batch_slot] = _Listed(row, to_device(np.stack((ids.astype(np.int32), bits)), self._device))

    def _check(self, tokens: NDArray[np.integer]) -> None:
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            raise DeviceError(
                f"tokens {tokens.min()} to {tokens.max()} are not all between 0 and {self._vocab_size - 1}"
            )

    def _fill(self, histories: Sequence[tuple[int, NDArray[np.int32], int]]) -> None:
        """All slots at once, in a few operations."""
        batch_slots = np.array([batch_slot for batch_slot, _, _ in histories], dtype=np.int64)
        self._counts.index_fill_(0, to_device(batch_slots, self._device), 0)
        flat = self._counts.view(-1)
        prompts = np.concatenate(
            [batch_slot * self._vocab_size + tokens[:n].astype(np.int64) for batch_slot, tokens, n in histories]
        )
        flat.index_fill_(0, to_device(prompts, self._device), _IN_PROMPT)
        answers = np.concatenate(
            [batch_slot * self._vocab_size + tokens[n:].astype(np.int64) for batch_slot, tokens, n in histories]
        )
        if len(answers):
            places, counts = np.unique(answers, return_counts=True)
            counts = np.minimum(counts, _MAX_COUNT).astype(np.int16)
            flat.index_add_(0, to_device(places, self._device), to_device(counts, self._device))
