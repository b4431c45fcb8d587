"""Matrices of 4-bit integers in groups with a scale and a zero point, in the layout that the GPU's kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PER_WORD = 8
"""Numbers of a word of 32 bits."""
GROUP_UNIT = 32
"""Groups of inputs are multiples of these, the inputs of four words."""
ZERO_BITS = 31
"""The bits of a scale that hold its zero point."""
_UNIT = 128
"""Rows are padded to multiples of these inputs."""
_LARGEST = 15
_CHUNK_ELEMENTS = 1 << 24
"""Elements that are quantized at once: their float32 copies take 192 MiB."""


@dataclass(frozen=True)
class Int4Groups:
    """The inputs that share a scale and a zero point, for each output channel."""

    size: int | None
    """Inputs of a group; None: all inputs."""

    def of(self, n_in: int) -> int:
        """Returns the inputs of a group in a matrix with ``n_in`` inputs."""
        return n_in if self.size is None else self.size

    @property
    def are_supported(self) -> bool:
        """Whether kernels read such groups: whole rows, or multiples of 32 inputs."""
        return self.size is None or self.size % GROUP_UNIT == 0


@dataclass(frozen=True)
class Int4Matrix:
    """A matrix [out, in]: ``(value - zero point) * scale``, with values of 0 to 15.

    A word of 32 bits has eight inputs: those with even index in its lower half, the others in its upper half, the
    first in the lowest bits. So each of four shifts gives two neighbouring inputs, in the halves of a register.
    """

    values: Tensor
    """[out, ceil(in / 128) * 16] int32. Inputs after the last are 0."""
    scales: Tensor
    """[groups, out] int32: float32 scales whose five lowest bits are the zero point, 0 to 16.

    Scales that were stored in 16 bits are exact; others are rounded to 19 significant bits."""
    n_in: int
    """Inputs."""
    group_size: int
    """Inputs of a group; the last may be cut."""

    @classmethod
    def allocate(cls, shape: tuple[int, int], groups: Int4Groups, device: torch.device) -> Int4Matrix:
        """Allocates a matrix without values."""
        n_out, n_in = shape
        size = groups.of(n_in)
        return cls(
            torch.empty(n_out, _n_words(n_in), dtype=torch.int32, device=device),
            torch.empty(-(-n_in // size), n_out, dtype=torch.int32, device=device),
            n_in,
            size,
        )

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.values.nbytes + self.scales.nbytes

    def __len__(self) -> int:
        """Returns the number of output channels."""
        return len(self.values)

    def rows(self, begin: int, end: int) -> Int4Matrix:
        """Returns a view of the output channels from ``begin`` to ``end``."""
        return Int4Matrix(self.values[begin:end], self.scales[:, begin:end], self.n_in, self.group_size)

    def split(self, n_rows: Sequence[int]) -> list[Int4Matrix]:
        """Returns views of stacked matrices."""
        parts = zip(self.values.split(list(n_rows)), self.scales.split(list(n_rows), 1), strict=True)
        return [Int4Matrix(values, scales, self.n_in, self.group_size) for values, scales in parts]

    def store(self, values: Tensor, scales: Tensor, zeros: Tensor) -> None:
        """Packs a matrix. Takes 1.5 bytes of temporary memory for each value.

        Args:
            values: [out, in] uint8, 0 to 15.
            scales: [out, groups].
            zeros: [out, groups]: what is subtracted from values, integers of 0 to 16.
        """
        padded = torch.nn.functional.pad(values, (0, -self.n_in % _UNIT)).unflatten(1, (-1, 2, 2, 2))
        packed = padded[:, :, :, 0] | padded[:, :, :, 1] << 4  # [out, words, bytes of a half, halves]
        self.values.copy_(packed.transpose(2, 3).flatten(1).view(torch.int32))
        bits = scales.float().view(torch.int32)
        rounded = (bits + ((ZERO_BITS >> 1) + (bits >> 5 & 1))) & ~ZERO_BITS
        self.scales.copy_((rounded | zeros.int()).t())

    def quantize(self, matrix: Tensor) -> None:
        """Stores a matrix [out, in], rounded, with scale and zero point from the range of each group.

        Takes up to 0.5 GiB of temporary memory.
        """
        n_rows = max(_CHUNK_ELEMENTS // self.n_in, 1)
        n_groups = len(self.scales)
        sizes = [n_rows] * (len(self) // n_rows) + ([len(self) % n_rows] if len(self) % n_rows else [])
        for part, rows in zip(self.split(sizes), matrix.split(n_rows), strict=True):
            padded = torch.nn.functional.pad(rows.float(), (0, n_groups * self.group_size - self.n_in))
            groups = padded.unflatten(1, (n_groups, self.group_size))
            low, high = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
            scales = ((high - low) / _LARGEST).clamp_(min=torch.finfo(torch.float32).tiny * 32)
            zeros = (-low / scales).round_().clamp_(0, _LARGEST)
            values = (groups / scales[..., None]).add_(zeros[..., None]).round_().clamp_(0, _LARGEST)
            part.store(values.flatten(1)[:, : self.n_in].to(torch.uint8), scales, zeros)

    def dequantize(self) -> Tensor:
        """Returns the matrix in float32."""
        shifts = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], dtype=torch.int32, device=self.values.device)
        values = (self.values[:, :, None] >> shifts & _LARGEST).flatten(1)[:, : self.n_in]
        groups = torch.arange(self.n_in, device=values.device) // self.group_size
        scales = (self.scales & ~ZERO_BITS).view(torch.float32)
        zeros = self.scales & ZERO_BITS
        matrix: Tensor = (values - zeros.t()[:, groups]).float() * scales.t()[:, groups]
        return matrix


def int4_bytes(shape: tuple[int, ...], groups: Int4Groups) -> int:
    """Returns the size of a matrix [out, in] with its scales in bytes."""
    n_out, n_in = shape
    return 4 * n_out * (_n_words(n_in) - (-n_in // groups.of(n_in)))


def _n_words(n_in: int) -> int:
    return -(-n_in // _UNIT) * (_UNIT // PER_WORD)
