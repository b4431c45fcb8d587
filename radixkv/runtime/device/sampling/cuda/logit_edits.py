"""Logit biases, bans, penalties and token masks of the batch slots' requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.runtime.device.memory.cuda.array_copies import to_device
from radixkv.runtime.device.sampling.cuda.logit_edit_kernels import (
    N_ROW_FIELDS,
    EditedRows,
    count_tokens,
    edit_rows,
    edit_tokens,
)
from radixkv.runtime.device.sampling.logit_edits import (
    MIN_REPETITION_PENALTY,
    TokenBiases,
    check_histories,
    split_history,
)
from radixkv.runtime.step.plan import RowSampling
from radixkv.runtime.step.result import TokenMasks

MAX_EDITED_ROWS = 128
"""Most rows edited at a time."""
_IN_PROMPT = -(1 << 15)
"""Sign bit of a token's count: the token is in the prompt."""
_MAX_COUNT = (1 << 15) - 1
"""Largest number of occurrences in the output that is counted."""


@dataclass(frozen=True)
class _SentBiases:
    """Biases and bans of a batch slot on the device."""

    parsed: TokenBiases
    entries: Tensor
    """[2, m] int32: distinct tokens, and the bits of their biases."""


@dataclass(frozen=True)
class SentMasks:
    """Token masks on the device."""

    index: dict[int, int]
    """Row of ``bits`` by row of the step's sampled rows."""
    bits: Tensor
    """[masks, words] int32."""

    @classmethod
    def send(cls, masks: TokenMasks, device: torch.device) -> SentMasks:
        """Enqueues the copy of the masks."""
        return cls({row: index for index, row in enumerate(masks.positions)}, to_device(masks.bits, device))


class LogitEdits:
    """Token counts of the batch slots, and edited copies of logits.

    Memory, allocated at once: ``2 * max_rows * vocab_size`` bytes for token counts, and
    ``4 * MAX_EDITED_ROWS * vocab_size`` for edited logits.

    Args:
        max_rows: number of batch slots.
        vocab_size: of the logits.
        device: the GPU.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._counts = torch.zeros(max_rows, vocab_size, dtype=torch.int16, device=device)
        self._edited = torch.zeros(min(MAX_EDITED_ROWS, max_rows), vocab_size, dtype=torch.float32, device=device)
        self._no_masks = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32, device=device)
        self._has_history = [False] * max_rows
        self._biases: list[_SentBiases | None] = [None] * max_rows

    def reset(self) -> None:
        """Resets all batch slots."""
        self._has_history = [False] * len(self._has_history)
        self._biases = [None] * len(self._biases)

    def adopt(self, batch_slots: Sequence[int], sampling: Sequence[RowSampling]) -> None:
        """Takes over histories, biases and bans, replacing those of a batch slot's previous request.

        Raises:
            DeviceError: a token id is outside the vocabulary, all tokens are banned, or a row has penalties without
                a history. Then no history has changed.
        """
        check_histories(batch_slots, sampling, self._has_history)
        histories, has_history = [], [row.history is not None or row.has_penalties for row in sampling]
        for batch_slot, row in zip(batch_slots, sampling, strict=True):
            if row.history is not None:
                histories.append((batch_slot, *split_history(row.history, self._vocab_size)))
            self._adopt_biases(batch_slot, row)
        for batch_slot, has in zip(batch_slots, has_history, strict=True):
            self._has_history[batch_slot] = has
        if histories:
            self._fill(histories)

    def apply(
        self,
        logits: Tensor,
        rows: Sequence[int],
        batch_slots: Sequence[int],
        sampling: Sequence[RowSampling],
        masks: SentMasks | None = None,
    ) -> Tensor:
        """Copies up to ``MAX_EDITED_ROWS`` rows to float32, and applies biases, bans, penalties and masks.

        The next call overwrites the result. If ``logits`` are finite, it has no NaN or inf, and -inf only for
        banned and masked tokens.

        Args:
            logits: [any, vocab], any float dtype.
            rows: [n], indices of the rows of ``logits``.
            batch_slots: [n], the batch slots of the rows, as adopted.
            sampling: [n], their settings.
            masks: of the rows that have one.

        Returns:
            [n, vocab].
        """
        mask_index = [-1] * len(rows) if masks is None else [masks.index.get(row, -1) for row in rows]
        row_info = np.empty((N_ROW_FIELDS, len(rows)), dtype=np.int32)
        row_info[:] = rows, batch_slots, [row.has_penalties for row in sampling], mask_index
        repetition = np.maximum([row.repetition_penalty for row in sampling], MIN_REPETITION_PENALTY)
        penalties = np.empty((4, len(rows)), dtype=np.float32)
        penalties[:] = (
            repetition,
            1.0 / repetition,
            [row.frequency_penalty for row in sampling],
            [row.presence_penalty for row in sampling],
        )
        sent = to_device(np.concatenate((row_info, penalties.view(np.int32))), self._device)
        row_fields, penalty_fields = sent[:N_ROW_FIELDS], sent[N_ROW_FIELDS:].view(torch.float32)
        bits = self._no_masks if masks is None else masks.bits
        edits = EditedRows(logits, self._counts, row_fields, penalty_fields, bits, self._edited[: len(rows)])
        edit_rows(edits)
        edited_rows = [
            (index, biases)
            for index, batch_slot in enumerate(batch_slots)
            if (biases := self._biases[batch_slot]) is not None
        ]
        if edited_rows:
            sizes = [biases.entries.shape[1] for _, biases in edited_rows]
            addresses = [biases.entries.data_ptr() for _, biases in edited_rows]
            lists = to_device(np.array((addresses, sizes, [index for index, _ in edited_rows])), self._device)
            edit_tokens(edits, lists, max(sizes))
        return edits.out

    def count(self, batch_slots: Sequence[int], rows: Sequence[int], tokens: Tensor, finite: Tensor) -> None:
        """Counts ``tokens[rows]`` in the outputs of ``batch_slots``, where the row is finite.

        Args:
            batch_slots: [n].
            rows: [n], indices into ``tokens`` and ``finite``.
            tokens: [any] int32.
            finite: [any] int32, 0 or 1.
        """
        count_tokens(
            self._counts, to_device(np.array((batch_slots, rows), dtype=np.int32), self._device), tokens, finite
        )

    def _adopt_biases(self, batch_slot: int, row: RowSampling) -> None:
        if not row.logit_bias and not row.banned:
            self._biases[batch_slot] = None
            return
        previous = self._biases[batch_slot]
        if previous is not None and previous.parsed.is_of(row):
            return
        parsed = TokenBiases.parse(row, self._vocab_size)
        entries = np.stack((parsed.ids.astype(np.int32), parsed.values.view(np.int32)))
        self._biases[batch_slot] = _SentBiases(parsed, to_device(entries, self._device))

    def _fill(self, histories: Sequence[tuple[int, NDArray[np.int64], NDArray[np.int64]]]) -> None:
        """Sets the counts of all given batch slots, in a few operations."""
        batch_slots = np.array([batch_slot for batch_slot, _, _ in histories], dtype=np.int64)
        self._counts.index_fill_(0, to_device(batch_slots, self._device), 0)
        flat = self._counts.view(-1)
        prompts = np.concatenate([batch_slot * self._vocab_size + prompt for batch_slot, prompt, _ in histories])
        flat.index_fill_(0, to_device(prompts, self._device), _IN_PROMPT)
        outputs = np.concatenate([batch_slot * self._vocab_size + output for batch_slot, _, output in histories])
        if len(outputs):
            indices, counts = np.unique(outputs, return_counts=True)
            counts = np.minimum(counts, _MAX_COUNT).astype(np.int16)
            flat.index_add_(0, to_device(indices, self._device), to_device(counts, self._device))
