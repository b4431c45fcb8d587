"""How the rows of a step draw, as numbers on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from radixkv.runtime.device.sampling.cuda.softmax_parts import LOG2_E
from radixkv.runtime.device.transfer_cuda import to_device
from radixkv.runtime.step.plan import RowSampling

MAX_LISTED = 128
"""A ``top_k`` up to here is listed; more is bounded by a search."""
MIN_TEMPERATURE = 1e-5
"""Below it the likeliest token is taken: the others' weights would be zero in float32."""
_SEED_MASK = (1 << 64) - 1
_N_NUMBERS = 7
"""Of a row, beside its seed."""


def is_greedy(sampling: RowSampling) -> bool:
    """Whether the likeliest token is taken."""
    return sampling.temperature < MIN_TEMPERATURE or sampling.top_k == 1


def top_k_of(sampling: RowSampling, vocab_size: int) -> int:
    """How many of the likeliest tokens one is drawn from; 0 for all."""
    if is_greedy(sampling):
        return 1
    return sampling.top_k if sampling.top_k < vocab_size else 0


@dataclass(frozen=True)
class DrawSettings:
    """One number a row, on the device."""

    seeds: Tensor
    """[n] int64"""
    sources: Tensor
    """[n] int32: the row of logits that is read,"""
    targets: Tensor
    """[n] int32: and whose token it is."""
    indexes: Tensor
    """[n] int32"""
    top_ks: Tensor
    """[n] int32; 0 for all"""
    scales: Tensor
    """[n] float32: what a difference of logits is multiplied by to be one of binary logarithms of weights."""
    floors: Tensor
    """[n] float32: weights must be above, where the largest is 1."""
    shares: Tensor
    """[n] float32: ``top_p``"""

    @property
    def n_rows(self) -> int:
        """Rows."""
        return len(self.seeds)

    def narrow(self, first: int, end: int) -> DrawSettings:
        """Rows ``first .. end - 1``."""
        return DrawSettings(
            *(
                numbers[first:end]
                for numbers in (
                    self.seeds,
                    self.sources,
                    self.targets,
                    self.indexes,
                    self.top_ks,
                    self.scales,
                    self.floors,
                    self.shares,
                )
            )
        )

    @classmethod
    def send(
        cls,
        sampling: Sequence[RowSampling],
        top_ks: Sequence[int],
        sources: Sequence[int],
        targets: Sequence[int],
        device: torch.device,
    ) -> DrawSettings:
        """In one copy; ``top_ks`` are those of ``top_k_of``."""
        n = len(sampling)
        buffer = np.empty((2 + _N_NUMBERS) * n, dtype=np.int32)
        buffer[: 2 * n].view(np.uint64)[:] = [row.seed & _SEED_MASK for row in sampling]
        numbers = buffer[2 * n :].reshape(_N_NUMBERS, n)
        floats = numbers[4:].view(np.float32)
        numbers[0] = sources
        numbers[1] = targets
        numbers[2] = [row.index for row in sampling]
        numbers[3] = top_ks
        floats[0] = [
            1.0 if top_k == 1 else LOG2_E / row.temperature for top_k, row in zip(top_ks, sampling, strict=True)
        ]
        floats[1] = [row.min_p for row in sampling]
        floats[1] = np.where(floats[1] > 0.0, np.nextafter(floats[1], np.float32(0.0)), 0.0)
        floats[2] = [row.top_p for row in sampling]
        sent = to_device(buffer, device)
        rest = sent[2 * n :].view(_N_NUMBERS, n)
        return cls(sent[: 2 * n].view(torch.int64), *rest[:4], *rest[4:].view(torch.float32))
