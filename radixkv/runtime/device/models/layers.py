"""The decoder's building blocks. A row's result depends on that row alone, bit for bit.

Elementwise arithmetic and ``exp`` give the same bits wherever an element lies; ``silu`` and ``sigmoid`` do not
(their vector and scalar forms round differently), so they are spelled out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from radixkv.runtime.device.attention.tiles import agreeing_tiles, cover
from radixkv.runtime.device.memory import claim
from radixkv.runtime.device.models.config import Llama3Scaling

_ROW_TILES = (8, 16, 32, 64, 128, 256)


class Linear:
    """``y = x @ weight.T`` in row tiles of agreeing sizes. ``weight`` is [out, in]."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.t().contiguous()
        generator = torch.Generator().manual_seed(0)
        sample = torch.randn(_ROW_TILES[-1], weight.shape[1], generator=generator)
        self._tiles = agreeing_tiles(lambda x: x @ self._weight, sample, _ROW_TILES)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        n = x.shape[0]
        tiles = cover(n, self._tiles)
        n_padded = sum(tiles)
        if n_padded > n:
            x = torch.cat([x, x.new_zeros(n_padded - n, x.shape[1])])
        if len(tiles) == 1:
            return torch.mm(x, self._weight)[:n]
        y = x.new_empty(n_padded, self._weight.shape[1])
        first = 0
        for tile in tiles:
            torch.mm(x[first : first + tile], self._weight, out=y[first : first + tile])
            first += tile
        return y[:n]


class RMSNorm:
    """``x / rms(x) * weight`` over the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, size] -> the same."""
        scale = x.square().mean(-1, keepdim=True).add_(self._eps).rsqrt_()
        return (x * scale).mul_(self._weight)


class Rotary:
    """Rotary position embedding, half-split as in Hugging Face checkpoints; angles are tabled once.

    Memory: ``2 * max_positions * head_dim`` floats, twice that while they are made.

    Raises:
        ConfigError: they do not fit into memory.
    """

    def __init__(self, head_dim: int, theta: float, scaling: Llama3Scaling | None, max_positions: int) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequencies = 1.0 / theta**exponents
        if scaling is not None:
            frequencies = _stretch(frequencies, scaling)
        with claim(
            16 * max_positions * head_dim,
            f"a table of rotary angles for max_model_len {max_positions}",
            "set max_model_len lower",
        ):
            angles = torch.arange(max_positions).float()[:, None] * frequencies
            cosine, sine = angles.cos(), angles.sin()
            self._cosine = torch.cat([cosine, cosine], -1)
            self._sine = torch.cat([-sine, sine], -1)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine, each [rows, 1, head_dim]."""
        return self._cosine[positions].unsqueeze(1), self._sine[positions].unsqueeze(1)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """[rows, heads, head_dim] -> the same, turned by ``Rotary.angles``."""
    half = x.shape[-1] // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], -1)
    return (x * cosine).add_(swapped.mul_(sine))


def swiglu(gate_up: Tensor) -> Tensor:
    """[rows, 2 * inner], gate first -> ``silu(gate) * up``, [rows, inner]."""
    gate, up = gate_up.chunk(2, -1)
    return (gate / gate.neg().exp_().add_(1.0)).mul_(up)


def _stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Slow frequencies by ``factor``, fast ones not at all, those between smoothly."""
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_max_position / scaling.low_freq_factor
    high = scaling.original_max_position / scaling.high_freq_factor
    smooth = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    stretched = torch.where(wavelengths > low, frequencies / scaling.factor, between)
    return torch.where(wavelengths < high, frequencies, stretched)
