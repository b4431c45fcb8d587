"""Batch-invariant building blocks of the decoder: in float32 a row's result depends on that row alone, bit for bit.

Elementwise arithmetic and ``exp`` give the same bits wherever an element is in memory. ``silu`` and ``sigmoid`` do
not (their vector and scalar code paths round differently), so they are written out. Expressions that bfloat16 would
round several times are computed in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from radixkv.runtime.device.memory_check import check_allocation
from radixkv.runtime.device.model_config.experts import ExpertConfig, SigmoidRouting
from radixkv.runtime.device.model_config.families import Activation
from radixkv.runtime.device.model_config.rope import Rope
from radixkv.runtime.device.ops import base
from radixkv.runtime.device.ops.base import Rows, as_tensor, gated
from radixkv.runtime.device.ops.cpu.agreeing_tiles import agreeing_tiles, cover
from radixkv.runtime.device.weights.layer_weights import ExpertsWeights, LinearWeights, MlpWeights

_GELU_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
"""GELU's approximation by tanh is ``x * sigmoid(slope * (x + 0.044715 * x**3))``."""
_CLAMP, _CLAMPED_SLOPE = 7.0, 1.702
"""GPT-OSS computes ``gate * sigmoid(slope * gate) * (up + 1)`` with both limited."""
_MIN_SUM = 1e-20
"""Is added to the sum of a token's scores by sigmoid before they are divided by it, as in Transformers."""
_ROW_TILES = (8, 16, 32, 64, 128, 256)
_CACHE_LINE_BYTES = 64
_LARGE_MATRIX_SIZE = 1 << 24
"""Number of elements above which a matrix uses ``_LARGE_ROW_TILES``."""
_LARGE_ROW_TILES = (8, 16, 32, 64)
"""Tile sizes tried for large matrices: larger tiles take seconds to try and are no faster."""


class RowTiles:
    """Cache of bit-equal row tiles by matrix shape and dtype: trying tiles takes longer than loading the matrix."""

    def __init__(self) -> None:
        self._by_shape: dict[tuple[torch.Size, torch.dtype], tuple[int, ...]] = {}

    def tiles_for(self, weight: Tensor) -> tuple[int, ...]:
        """Returns the tile sizes for products with ``weight``, [in, out]."""
        key = weight.shape, weight.dtype
        if key not in self._by_shape:
            sizes = _LARGE_ROW_TILES if weight.numel() > _LARGE_MATRIX_SIZE else _ROW_TILES
            generator = torch.Generator().manual_seed(0)
            sample = torch.randn(sizes[-1], len(weight), generator=generator).to(weight.dtype)
            self._by_shape[key] = agreeing_tiles(lambda x: x @ weight, sample, sizes)
        return self._by_shape[key]


class Linear(base.Linear):
    """``y = x @ weight.T + bias``, computed in row tiles of bit-equal sizes."""

    def __init__(self, weights: LinearWeights, tiles: RowTiles) -> None:
        assert isinstance(weights.weight, Tensor), (
            "weights in FP8 and in 4 bits are opened for devices that multiply them"
        )
        self._weight = weights.weight.t().contiguous()
        self._bias = weights.bias
        self._tiles = tiles.tiles_for(self._weight)
        # The bits of a product with few columns depend on the alignment of its output to a cache line (MKL on an
        # AMD EPYC, 5 and 6 columns). If rows are not whole cache lines, each tile is computed in its own memory.
        row_bytes = self._weight.shape[1] * self._weight.element_size()
        self._writes_in_place = row_bytes % _CACHE_LINE_BYTES == 0

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.Linear``."""
        assert isinstance(x, Tensor), "norms write tensors on the CPU"
        n = len(x)
        tiles = cover(n, self._tiles)
        n_padded = sum(tiles)
        if n_padded > n:
            x = torch.cat([x, x.new_zeros(n_padded - n, x.shape[1])])
        if len(tiles) == 1:
            y = torch.mm(x, self._weight)
        else:
            y = x.new_empty(n_padded, self._weight.shape[1])
            first = 0
            for tile in tiles:
                rows = slice(first, first + tile)
                if self._writes_in_place:
                    torch.mm(x[rows], self._weight, out=y[rows])
                else:
                    y[rows] = torch.mm(x[rows], self._weight)
                first += tile
        y = y[:n]
        if self._bias is not None:
            y.add_(self._bias)
        return y if out is None else out.copy_(y)


@dataclass(frozen=True)
class RMSNorm(base.Norm):
    """``x / rms(x) * weight`` over the last dimension, with the root mean square in float32.

    The quotient is rounded to the dtype of ``x`` before it is multiplied, unless the weight is float32.
    """

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """See ``ops.base.Norm``."""
        full = x.float()
        scale = full.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return (full * scale).to(self.weight.dtype).mul_(self.weight).to(x.dtype)


@dataclass(frozen=True)
class LayerNorm(base.Norm):
    """``(x - mean(x)) / deviation(x) * weight + bias`` over rows, in float32."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """See ``ops.base.Norm``."""
        full = x.float()
        full = full - full.mean(-1, keepdim=True)
        scale = full.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return full.mul_(scale).mul_(self.weight).add_(self.bias).to(x.dtype)


class Rotary:
    """Table of rotary angles in float32, half-split as in Hugging Face checkpoints.

    Memory: ``2 * max_positions * head_dim`` floats, twice that during construction.

    Raises:
        ConfigError: the table does not fit into memory.
    """

    def __init__(self, head_dim: int, rope: Rope, max_positions: int) -> None:
        with check_allocation(
            16 * max_positions * head_dim,
            f"a table of rotary angles for max_model_len {max_positions}",
            "set max_model_len lower",
        ):
            cosine, sine = rope.cosine_sine(head_dim, max_positions)
            self._cosine = torch.cat([cosine, cosine], -1)
            self._sine = torch.cat([-sine, sine], -1)
        self._positions: Tensor | None = None
        """Positions of the last call: all layers of a step pass the same object."""
        self._angles = (self._cosine[:0], self._sine[:0])

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosine and signed sine for [rows] positions, each [rows, 1, head_dim]."""
        if positions is not self._positions:
            self._positions = positions
            self._angles = self._cosine[positions].unsqueeze(1), self._sine[positions].unsqueeze(1)
        return self._angles


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates ``x``, [rows, heads, head_dim], by the angles of ``Rotary.angles``."""
    full = x.float()
    half = x.shape[-1] // 2
    swapped = torch.cat([full[..., half:], full[..., :half]], -1)
    return (full * cosine).add_(swapped.mul_(sine)).to(x.dtype)


def activate(kind: Activation, x: Tensor) -> Tensor:
    """Applies an activation.

    Args:
        kind: which one.
        x: [rows, 2 * inner], gate first; [rows, inner] if the activation has no gate. Overwritten then.

    Returns:
        [rows, inner], of the same dtype.
    """
    if kind == "relu":
        return x.relu_()
    if kind == "relu2":
        return x.relu_().square_()
    gate, up = x.float().chunk(2, -1)
    if kind == "clamped_silu":
        gate, up = gate.clamp(max=_CLAMP), up.clamp(-_CLAMP, _CLAMP)
        return (gate / (-_CLAMPED_SLOPE * gate).exp_().add_(1.0)).mul_(up.add_(1.0)).to(x.dtype)
    slope = gate if kind == "silu" else (0.044715 * gate**3).add_(gate).mul_(_GELU_SLOPE)
    return (gate / slope.neg().exp_().add_(1.0)).mul_(up).to(x.dtype)


class Mlp(base.Mlp):
    """Dense MLP: ``down(silu(gate(x)) * up(x))``, or with another activation."""

    _CHUNK_ROWS = 256
    """Rows computed at once, few enough to keep the intermediate activations in the processor's cache."""

    def __init__(self, weights: MlpWeights, tiles: RowTiles, activation: Activation) -> None:
        self._activation: Activation = activation
        self._gate_up = Linear(weights.gate_up, tiles)
        self._down = Linear(weights.down, tiles)

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.Mlp``."""
        assert isinstance(x, Tensor), "norms write tensors on the CPU"
        chunks = []
        for rows in x.split(self._CHUNK_ROWS):
            chunks.append(self._down(activate(self._activation, self._gate_up(rows))))
        return torch.cat(chunks, out=out)


class Experts(base.Mlp, base.RoutedExperts):
    """Mixture of experts: a weighted sum of the MLPs that a router selects for each token, and of a shared one.

    Only selected experts compute, each for all of its tokens at once. A token's terms are always added in the order
    of expert indices, so the result does not depend on other tokens.
    """

    def __init__(
        self,
        weights: ExpertsWeights,
        tiles: RowTiles,
        activation: Activation,
        config: ExpertConfig,
    ) -> None:
        self._config = config
        self._router = Linear(weights.router, tiles)
        self._experts = [Mlp(expert, tiles, activation) for expert in weights.experts()]
        self._scales = None if weights.scales is None else weights.scales.float()
        self._correction = weights.correction
        self._shared: tuple[Mlp, Linear | None] | None = None
        if (shared := weights.shared) is not None:
            weight = None if shared.weight is None else Linear(shared.weight, tiles)
            self._shared = Mlp(shared.mlp, tiles, activation), weight

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.Mlp``."""
        return self.mixed(as_tensor(x), as_tensor(x), out)

    def mixed(self, x: Tensor, routed: Tensor, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.RoutedExperts``."""
        expert_weights, chosen = self._route(routed)
        total = torch.zeros_like(x) if out is None else out.zero_()
        for index in sorted(set(chosen.flatten().tolist())):
            rows, ranks = (chosen == index).nonzero(as_tuple=True)
            # Each row occurs at most once, so the order of additions is fixed.
            total.index_add_(0, rows, self._experts[index](x[rows]) * expert_weights[rows, ranks, None])
        if self._shared is not None:
            mlp, weight = self._shared
            total.add_(mlp(x) if weight is None else gated(mlp(x), weight(x)))
        return total

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns weights and indices of the selected experts, each [rows, active]."""
        if self._config.sigmoid is not None:
            return self._route_by_sigmoid(x, self._config.sigmoid)
        expert_weights, chosen = self._router(x).float().softmax(-1).topk(self._config.n_active, -1)
        if self._config.normalizes:
            expert_weights = expert_weights / expert_weights.sum(-1, keepdim=True)
        if self._scales is not None:
            expert_weights = expert_weights * self._scales[chosen]
        return expert_weights.to(x.dtype), chosen

    def _route_by_sigmoid(self, x: Tensor, routing: SigmoidRouting) -> tuple[Tensor, Tensor]:
        """Returns what ``_route`` does."""
        assert self._correction is not None, "a router by sigmoid has a correction"
        scores = self._router(x.float()).neg_().exp_().add_(1.0).reciprocal_()
        corrected = scores + self._correction
        if routing.n_groups > 1:
            groups = corrected.unflatten(1, (routing.n_groups, -1))
            used = groups.topk(2, -1).values.sum(-1).topk(routing.n_used_groups, -1).indices
            is_used = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter_(1, used, True)
            corrected = groups.masked_fill(~is_used.unsqueeze(-1), -math.inf).flatten(1)
        chosen = corrected.topk(self._config.n_active, -1).indices
        expert_weights = scores.gather(1, chosen)
        if self._config.normalizes:
            expert_weights = expert_weights / (expert_weights.sum(-1, keepdim=True) + _MIN_SUM)
        return (expert_weights * routing.scale).to(x.dtype), chosen
