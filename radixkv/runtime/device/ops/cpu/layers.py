"""The decoder's building blocks. In float32 a row's result depends on that row alone, bit for bit.

Elementwise arithmetic and ``exp`` give the same bits wherever an element lies; ``silu`` and ``sigmoid`` do not
(their vector and scalar forms round differently), so they are spelled out. What bfloat16 would round
several times is computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixkv.runtime.device.host_memory import claim
from radixkv.runtime.device.ops.cpu.agreeing_tiles import agreeing_tiles, cover
from radixkv.runtime.device.spec.rope import Rope
from radixkv.runtime.device.weights.weights import LinearWeights

_ROW_TILES = (8, 16, 32, 64, 128, 256)
_LINE_BYTES = 64
_LARGE_NUMBERS = 1 << 24
_LARGE_ROW_TILES = (8, 16, 32, 64)
"""For matrices of more numbers than that: larger tiles take seconds to try, and are no faster."""


class RowTiles:
    """Row tiles that agree, by the shape of the matrix: trying them takes longer than loading it."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.Size, torch.dtype], tuple[int, ...]] = {}

    def of(self, weight: Tensor) -> tuple[int, ...]:
        """For products with ``weight``, [in, out]."""
        key = weight.shape, weight.dtype
        if key not in self._known:
            sizes = _LARGE_ROW_TILES if weight.numel() > _LARGE_NUMBERS else _ROW_TILES
            generator = torch.Generator().manual_seed(0)
            sample = torch.randn(sizes[-1], len(weight), generator=generator).to(weight.dtype)
            self._known[key] = agreeing_tiles(lambda x: x @ weight, sample, sizes)
        return self._known[key]


class Linear:
    """``y = x @ weight.T + bias`` in row tiles of agreeing sizes."""

    def __init__(self, weights: LinearWeights, tiles: RowTiles) -> None:
        self._weight = weights.weight.t().contiguous()
        self._bias = weights.bias
        self._tiles = tiles.of(self._weight)
        # A product of few columns has other bits where its result begins elsewhere in a cache line (MKL on an AMD
        # EPYC, 5 and 6 columns): then each is made in memory of its own.
        row_bytes = self._weight.shape[1] * self._weight.element_size()
        self._is_made_in_place = row_bytes % _LINE_BYTES == 0

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        y = self._products(x)
        return y if self._bias is None else y.add_(self._bias)

    def _products(self, x: Tensor) -> Tensor:
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
            rows = slice(first, first + tile)
            if self._is_made_in_place:
                torch.mm(x[rows], self._weight, out=y[rows])
            else:
                y[rows] = torch.mm(x[rows], self._weight)
            first += tile
        return y[:n]


class RMSNorm:
    """``x / rms(x) * weight`` over the last dimension; the root mean square in float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size] -> the same."""
        full = x.float()
        scale = full.square().mean(-1, keepdim=True).add_(self._eps).rsqrt_()
        return (full * scale).to(x.dtype).mul_(self._weight)


class Rotary:
    """Rotary position embedding, half-split as in Hugging Face checkpoints; angles are tabled once, in float32.

    Memory: ``2 * max_positions * head_dim`` floats, twice that while they are made.

    Raises:
        ConfigError: they do not fit into memory.
    """

    def __init__(self, head_dim: int, rope: Rope, max_positions: int) -> None:
        with claim(
            16 * max_positions * head_dim,
            f"a table of rotary angles for max_model_len {max_positions}",
            "set max_model_len lower",
        ):
            angles = torch.arange(max_positions).float()[:, None] * rope.frequencies(head_dim)
            cosine, sine = angles.cos() * rope.amplitude, angles.sin() * rope.amplitude
            self._cosine = torch.cat([cosine, cosine], -1)
            self._sine = torch.cat([-sine, sine], -1)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine, each [rows, 1, head_dim]."""
        return self._cosine[positions].unsqueeze(1), self._sine[positions].unsqueeze(1)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """[rows, heads, head_dim] -> the same, turned by ``Rotary.angles``."""
    full = x.float()
    half = x.shape[-1] // 2
    swapped = torch.cat([full[..., half:], full[..., :half]], -1)
    return (full * cosine).add_(swapped.mul_(sine)).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """[rows, 2 * inner], gate first -> ``silu(gate) * up``, [rows, inner]."""
    gate, up = gate_up.float().chunk(2, -1)
    return (gate / gate.neg().exp_().add_(1.0)).mul_(up).to(gate_up.dtype)
