"""Sampling settings of a step's rows as tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from radixkv.runtime.device.memory.cuda.array_copies import to_device
from radixkv.runtime.device.sampling.cuda.softmax_parts import LOG2_E
from radixkv.runtime.step.plan import RowSampling

MAX_LISTED = 128
"""Largest ``top_k`` whose tokens are listed; a larger one is applied by a search for the lowest kept weight."""
_SEED_MASK = (1 << 64) - 1
_N_VALUES = 7
"""int32 or float32 settings per row, besides the int64 seed."""


class DrawSettings(NamedTuple):
    """Sampling settings on the device, one element per drawn row, in the order of the kernels' parameters."""

    sources: Tensor
    """[n] int32: index of the row of logits to read."""
    targets: Tensor
    """[n] int32: index of the token to write."""
    scales: Tensor
    """[n] float32: factor from a difference of logits to a difference of log2 weights."""
    floors: Tensor
    """[n] float32: a token's weight must exceed this, where the largest weight is 1."""
    shares: Tensor
    """[n] float32: ``top_p``."""
    top_ks: Tensor
    """[n] int32: ``top_k``; 0 for all tokens."""
    seeds: Tensor
    """[n] int64: seeds of the requests."""
    indexes: Tensor
    """[n] int32: index of the token in its request's output."""

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.seeds)

    def narrow(self, first: int, end: int) -> DrawSettings:
        """Returns views of rows ``first .. end - 1``."""
        return DrawSettings(*(values[first:end] for values in self))

    @classmethod
    def send(
        cls,
        sampling: Sequence[RowSampling],
        top_ks: Sequence[int],
        sources: Sequence[int],
        targets: Sequence[int],
        device: torch.device,
    ) -> DrawSettings:
        """Sends settings in one copy.

        Args:
            sampling: [n].
            top_ks: [n], from ``top_k_of``.
            sources: [n], see the attribute.
            targets: [n], see the attribute.
            device: the GPU.
        """
        n = len(sampling)
        buffer = np.empty((2 + _N_VALUES) * n, dtype=np.int32)
        buffer[: 2 * n].view(np.uint64)[:] = [row.seed & _SEED_MASK for row in sampling]
        values = buffer[2 * n :].reshape(_N_VALUES, n)
        floats = values[4:].view(np.float32)
        values[0] = sources
        values[1] = targets
        values[2] = [row.index for row in sampling]
        values[3] = top_ks
        floats[0] = [
            1.0 if top_k == 1 else LOG2_E / row.temperature for top_k, row in zip(top_ks, sampling, strict=True)
        ]
        floats[1] = [row.min_p for row in sampling]
        floats[1] = np.where(floats[1] > 0.0, np.nextafter(floats[1], np.float32(0.0)), 0.0)
        floats[2] = [row.top_p for row in sampling]
        sent = to_device(buffer, device)
        rest = sent[2 * n :].view(_N_VALUES, n)
        sent_sources, sent_targets, indexes, sent_top_ks = rest[:4]
        scales, minima, shares = rest[4:].view(torch.float32)
        seeds = sent[: 2 * n].view(torch.int64)
        return cls(sent_sources, sent_targets, scales, minima, shares, sent_top_ks, seeds, indexes)
