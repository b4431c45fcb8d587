"""The GPU's sampler: chooses tokens from logits and computes their logprobs, without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from radixkv.runtime.device.memory.cuda.array_copies import to_device
from radixkv.runtime.device.ops.cuda.argmax import FEW_ROWS, argmax, argmax_scratch
from radixkv.runtime.device.sampling.cuda.draw import draw_listed, draw_unlisted
from radixkv.runtime.device.sampling.cuda.draw_settings import MAX_LISTED, DrawSettings
from radixkv.runtime.device.sampling.cuda.logit_edits import MAX_EDITED_ROWS, LogitEdits, SentMasks
from radixkv.runtime.device.sampling.cuda.logprobs import PendingLogprobs
from radixkv.runtime.device.sampling.logit_edits import has_edits
from radixkv.runtime.device.sampling.row_sampling import check_targets, is_greedy, top_k_of
from radixkv.runtime.step.plan import History, RowSampling
from radixkv.runtime.step.result import TokenMasks
from radixkv.wire.messages import TokenLogprobs


@dataclass(frozen=True)
class SampledRows:
    """Sampled tokens on the device, and logprobs being copied to the host."""

    tokens: Tensor
    """[rows] int32; 0 where logits are not finite."""
    logprob_rows: Sequence[int]
    """Indices of the rows that report logprobs."""
    logprobs: PendingLogprobs | None
    """Logprobs of these rows; None if there are none."""

    def collect(self) -> list[TokenLogprobs | None]:
        """Returns logprobs by row; None if not reported, or not finite. Call it after the step's event."""
        by_row: list[TokenLogprobs | None] = [None] * len(self.tokens)
        if self.logprobs is not None:
            for row, logprobs in zip(self.logprob_rows, self.logprobs.collect(), strict=True):
                by_row[row] = logprobs
        return by_row


@dataclass(frozen=True)
class PromptLogprobs:
    """Logprobs of prompt tokens, being copied to the host."""

    pending: PendingLogprobs

    def collect(self) -> list[TokenLogprobs] | None:
        """Returns logprobs by row; None if the logits of any row are not finite. Call it after the step's event."""
        by_row = self.pending.collect()
        finite = [logprobs for logprobs in by_row if logprobs is not None]
        return finite if len(finite) == len(by_row) else None


class CudaSampler:
    """Samples tokens on the device, and counts each batch slot's output tokens there for penalties.

    ``row_sampling`` and ``logit_edits`` say what a row's settings mean. One thing differs: a ``top_k`` above
    ``MAX_LISTED`` keeps all tokens equal to the last one. A row's token depends only on the row's logits and
    settings, not on the other rows of the batch.

    Everything is enqueued on the current stream, and nothing waits.

    Memory, allocated at once: that of ``LogitEdits``. A call takes up to 20 kB per row besides.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        """Allocates the device memory.

        Args:
            max_rows: number of batch slots.
            vocab_size: of the logits.
            device: the GPU.
        """
        self._vocab_size = vocab_size
        self._device = device
        self._edits = LogitEdits(max_rows, vocab_size, device)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compiles every kernel for logits of this dtype. Takes seconds, or little time with a warm cache.

        Resets all batch slots.
        """
        several = torch.zeros(FEW_ROWS + 1, self._vocab_size, dtype=dtype, device=self._device)
        logits = several[:1]
        tokens, finite = torch.ones(2, 1, dtype=torch.int32, device=self._device)
        listed = RowSampling(temperature=1.0, top_k=2, top_p=0.9, seed=0, index=0, n_logprobs=1)
        drawn = replace(listed, top_k=0)
        edits = {"history": History(bytes(4), 1), "presence_penalty": 1.0, "logit_bias": ((0, 1.0),)}
        for row in (listed, drawn, replace(listed, **edits), replace(drawn, **edits)):
            self.sample(logits, [0], [row], tokens, finite)
        masks = TokenMasks((0,), np.full((1, -(-self._vocab_size // 32)), -1, dtype=np.int32))
        self.sample(logits, [0], [replace(listed, is_masked=True)], tokens, finite, masks)
        for scored in (logits, several):
            self.score(scored, np.zeros(len(scored), dtype=np.int32), 1)
        self._edits.reset()

    def sample(
        self,
        logits: Tensor,
        batch_slots: Sequence[int],
        sampling: Sequence[RowSampling],
        greedy: Tensor,
        finite: Tensor,
        masks: TokenMasks | None = None,
    ) -> SampledRows:
        """Samples one token per row.

        A row whose logits are not finite leaves its batch slot's history unchanged.

        Args:
            logits: [rows, vocab], any float dtype, rows may be strided; not changed.
            batch_slots: [rows], distinct.
            sampling: [rows].
            greedy: [rows] int32, each row's argmax token, the smallest id of equal ones.
            finite: [rows] int32, 1 where all logits are finite, else 0.
            masks: of the masked rows, with indices of ``sampling``; None if no row has one.

        Raises:
            DeviceError: a token id is outside the vocabulary, all tokens are banned, or a row has penalties without
                a history. Then no batch slot's history has changed.
        """
        self._edits.adopt(batch_slots, sampling)
        tokens = greedy.clone()
        edited, plain = [], []
        for row, each in enumerate(sampling):
            if has_edits(each):
                edited.append(row)
            elif not is_greedy(each):
                plain.append(row)
        if plain:
            self._draw(logits, plain, plain, sampling, tokens)
        sent_masks = None if masks is None else SentMasks.send(masks, self._device)
        for first in range(0, len(edited), MAX_EDITED_ROWS):
            chunk = edited[first : first + MAX_EDITED_ROWS]
            values = self._edits.apply(
                logits, chunk, [batch_slots[row] for row in chunk], [sampling[row] for row in chunk], sent_masks
            )
            self._draw(values, range(len(chunk)), chunk, sampling, tokens)
        tokens.mul_(finite)
        counted = [row for row in edited if sampling[row].has_penalties]
        if counted:
            self._edits.count([batch_slots[row] for row in counted], counted, tokens, finite)
        reported = [(row, each.n_logprobs) for row, each in enumerate(sampling) if each.n_logprobs is not None]
        rows = [row for row, _ in reported]
        logprobs = PendingLogprobs(logits, rows, [n for _, n in reported], tokens, finite) if reported else None
        return SampledRows(tokens, rows, logprobs)

    def score(self, logits: Tensor, targets: NDArray[np.integer], n_logprobs: int) -> PromptLogprobs:
        """Computes the logprobs of ``targets``, one per row of logits.

        Args:
            logits: [rows, vocab], any float dtype.
            targets: [rows], at least one.
            n_logprobs: how many of the likeliest tokens to list for each.

        Raises:
            DeviceError: a target is outside the vocabulary.
        """
        check_targets(targets, self._vocab_size)
        n_rows = len(targets)
        greedy, finite = torch.empty(2, n_rows, dtype=torch.int32, device=self._device)
        argmax(logits, greedy, finite, argmax_scratch(n_rows, self._vocab_size, self._device))
        tokens = to_device(targets.astype(np.int32), self._device)
        return PromptLogprobs(PendingLogprobs(logits, range(n_rows), [n_logprobs] * n_rows, tokens, finite))

    def _draw(
        self,
        values: Tensor,
        sources: Sequence[int],
        targets: Sequence[int],
        sampling: Sequence[RowSampling],
        tokens: Tensor,
    ) -> None:
        """Draws ``tokens[targets]`` from rows ``sources`` of ``values``."""
        top_ks = [top_k_of(sampling[row], self._vocab_size) for row in targets]
        listed = [index for index, top_k in enumerate(top_ks) if 0 < top_k <= MAX_LISTED]
        others = [index for index, top_k in enumerate(top_ks) if not 0 < top_k <= MAX_LISTED]
        order = listed + others
        settings = DrawSettings.send(
            [sampling[targets[index]] for index in order],
            [top_ks[index] for index in order],
            [sources[index] for index in order],
            [targets[index] for index in order],
            self._device,
        )
        if listed:
            width = max(top_ks[index] for index in listed)
            draw_listed(values, settings.narrow(0, len(listed)), width, tokens)
        if others:
            draw_unlisted(values, settings.narrow(len(listed), len(order)), tokens)
