"""Matrices in FP8 (e4m3) with scales, as ``quant_method`` ``fp8`` and compressed-tensors store them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from radixkv.runtime.device.weights.fp8_matrix import BLOCK, Fp8Scales
from radixkv.runtime.device.weights.quantization.scheme import WeightScheme
from radixkv.runtime.device.weights.safetensors import Header

_FP8 = ("F8_E4M3",)


def fp8_scales(scheme: WeightScheme | None) -> Fp8Scales | None:
    """Returns how FP8 products take the scales of a format; None if there is no such product."""
    if isinstance(scheme, Fp8Channels):
        return "channels"
    return "blocks" if isinstance(scheme, Fp8Blocks) and scheme.block == (BLOCK, BLOCK) else None


@dataclass(frozen=True)
class Fp8Channels:
    """One scale for each output channel, or one for the whole matrix."""

    strategy: Literal["channel", "tensor"]
    name = "fp8"
    mark = scales = "weight_scale"
    unit = (1, 1)

    def headers(self, shape: tuple[int, ...]) -> Mapping[str, Header]:
        """See ``WeightScheme.headers``."""
        n_out, n_in = shape
        scale = Header((n_out, 1)) if self.strategy == "channel" else Header((1,), may_be_scalar=True)
        return {"weight": Header((n_out, n_in), _FP8), "weight_scale": scale}

    def optional(self) -> frozenset[str]:
        """Activations are not quantized, so their scale is not used."""
        return frozenset({"input_scale"})

    def dequantize(self, read: Callable[[str], Tensor]) -> Tensor:
        """See ``WeightScheme.dequantize``."""
        return read("weight").float() * read("weight_scale").float()


@dataclass(frozen=True)
class Fp8Blocks:
    """One scale for each block of the matrix."""

    block: tuple[int, int]
    """Output channels and inputs of a block."""
    scales: str
    """``weight_scale_inv`` of ``quant_method`` ``fp8``, or ``weight_scale`` of compressed-tensors. Weights are
    multiplied by either."""
    name = "fp8"

    @property
    def mark(self) -> str:
        """See ``WeightScheme.mark``."""
        return self.scales

    @property
    def unit(self) -> tuple[int, int]:
        """See ``WeightScheme.unit``."""
        return self.block

    def headers(self, shape: tuple[int, ...]) -> Mapping[str, Header]:
        """See ``WeightScheme.headers``. The last blocks may be cut."""
        n_out, n_in = shape
        rows, columns = self.block
        return {
            "weight": Header((n_out, n_in), _FP8),
            self.scales: Header((-(-n_out // rows), -(-n_in // columns))),
        }

    def optional(self) -> frozenset[str]:
        """See ``WeightScheme.optional``."""
        return frozenset({"input_scale"})

    def dequantize(self, read: Callable[[str], Tensor]) -> Tensor:
        """See ``WeightScheme.dequantize``."""
        weight, scales = read("weight").float(), read(self.scales).float()
        rows, columns = self.block
        scales = scales.repeat_interleave(rows, 0)[: len(weight)]
        return weight.mul_(scales.repeat_interleave(columns, 1)[:, : weight.shape[1]])
