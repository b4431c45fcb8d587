"""Matrices in FP8 (e4m3) with scales, as the GPU multiplies them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from radixkv.runtime.device.kv_dtype import FP8, FP8_MAX

Fp8Scales = Literal["channels", "blocks"]
"""One scale for each output channel, or for each block of 128 × 128."""
BLOCK = 128
"""Output channels, and inputs, of a block with its own scale."""
_CHUNK_ELEMENTS = 1 << 24
"""Elements that are quantized at once."""
QUANTIZING_BYTES = 8 * _CHUNK_ELEMENTS
"""Temporary memory of ``Fp8Matrix.quantize``: two copies in float32."""


@dataclass(frozen=True)
class Fp8Matrix:
    """A matrix, or the matrices of all experts: ``values * scales``, with one scale for a channel or a block."""

    values: Tensor
    """[..., out, in] e4m3."""
    scales: Tensor
    """float32: [..., out], one for each output channel; or [..., ceil(out / 128), ceil(in / 128)]."""

    @classmethod
    def allocate(cls, shape: tuple[int, ...], *, scales: Fp8Scales, device: torch.device) -> Fp8Matrix:
        """Allocates a matrix without values."""
        *experts, n_out, n_in = shape
        sizes = (-(-n_out // BLOCK), -(-n_in // BLOCK)) if scales == "blocks" else (n_out,)
        return cls(
            torch.empty(shape, dtype=FP8, device=device),
            torch.empty((*experts, *sizes), dtype=torch.float32, device=device),
        )

    @property
    def has_blocks(self) -> bool:
        """Whether each block of 128 × 128 has a scale; otherwise each output channel has one."""
        return self.scales.ndim == self.values.ndim

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.values.nbytes + self.scales.nbytes

    def __len__(self) -> int:
        """Returns the number of output channels, or of experts."""
        return len(self.values)

    def expert(self, index: int) -> Fp8Matrix:
        """Returns a view of the matrix of one expert."""
        return Fp8Matrix(self.values[index], self.scales[index])

    def split(self, n_rows: Sequence[int]) -> list[Fp8Matrix]:
        """Returns views of stacked matrices. With blocks, each size but the last must be a multiple of 128."""
        unit = BLOCK if self.has_blocks else 1
        counts = [-(-n // unit) for n in n_rows]
        parts = zip(self.values.split(list(n_rows)), self.scales.split(counts), strict=True)
        return [Fp8Matrix(values, scales) for values, scales in parts]

    def quantize(self, matrix: Tensor) -> None:
        """Stores a matrix [out, in], rounded, with the scale of its largest value in each channel or block.

        Takes up to 128 MiB of temporary memory.
        """
        n_out, n_in = matrix.shape
        unit = BLOCK if self.has_blocks else 1
        n_rows = max(_CHUNK_ELEMENTS // n_in // BLOCK, 1) * BLOCK
        for first in range(0, n_out, n_rows):
            rows = matrix[first : first + n_rows].to(torch.float32, copy=True)
            maxima = rows.abs().amax(1, keepdim=True) if unit == 1 else _block_maxima(rows)
            scales = maxima.clamp_(min=torch.finfo(torch.float32).tiny * FP8_MAX).div_(FP8_MAX)
            rows.div_(scales if unit == 1 else _expand(scales, rows))
            self.values[first : first + n_rows] = rows.clamp_(-FP8_MAX, FP8_MAX).to(FP8)
            target = self.scales[first // unit : -(-(first + len(rows)) // unit)]
            target.copy_(scales.view_as(target))

    def dequantize(self) -> Tensor:
        """Returns the matrix or matrices in float32."""
        values: Tensor = self.values.float()
        return values.mul_(_expand(self.scales, values) if self.has_blocks else self.scales[..., None])


def fp8_bytes(shape: tuple[int, ...], scales: Fp8Scales) -> int:
    """Returns the size of a matrix [out, in], or of experts' matrices, with its scales in bytes."""
    *experts, n_out, n_in = shape
    n_scales = -(-n_out // BLOCK) * -(-n_in // BLOCK) if scales == "blocks" else n_out
    return math.prod(experts) * (n_out * n_in + 4 * n_scales)


def _block_maxima(rows: Tensor) -> Tensor:
    n_out, n_in = rows.shape
    padded = torch.nn.functional.pad(rows.abs(), (0, -n_in % BLOCK, 0, -n_out % BLOCK))
    blocks: Tensor = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    return blocks.amax((1, 3))


def _expand(scales: Tensor, rows: Tensor) -> Tensor:
    """Returns the scales of blocks for each value of ``rows``."""
    wide: Tensor = scales.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)
    return wide[..., : rows.shape[-2], : rows.shape[-1]]
