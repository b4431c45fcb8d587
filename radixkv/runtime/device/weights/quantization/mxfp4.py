"""Experts' matrices in MXFP4: 4-bit floats in blocks of 32 with a power of two (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from radixkv.runtime.device.weights.safetensors import Header

_BLOCK = 32
_BYTES = ("U8",)
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of e2m1 without its sign, the highest bit."""
_EXPONENT_BIAS = 127


@dataclass(frozen=True)
class Mxfp4:
    """The layout of GPT-OSS: two values a byte, the first in the lower bits, along the inputs."""

    name = "mxfp4"
    mark = "_blocks"
    scales = "_scales"
    unit = (1, _BLOCK)

    def headers(self, shape: tuple[int, ...]) -> Mapping[str, Header]:
        """See ``WeightScheme.headers``. Only experts' matrices have this format."""
        n_experts, n_in, n_out = shape
        if n_in % _BLOCK:
            raise ValueError(f"{n_in} inputs are not whole blocks of {_BLOCK}")
        blocks = n_experts, n_out, n_in // _BLOCK
        return {"_blocks": Header((*blocks, _BLOCK // 2), _BYTES), "_scales": Header(blocks, _BYTES)}

    def optional(self) -> frozenset[str]:
        """See ``WeightScheme.optional``."""
        return frozenset()

    def dequantize(self, read: Callable[[str], Tensor]) -> Tensor:
        """See ``WeightScheme.dequantize``."""
        blocks, exponents = read("_blocks"), read("_scales").int() - _EXPONENT_BIAS
        values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=blocks.device)
        nibbles = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
        return torch.ldexp(values[nibbles.int()], exponents[..., None]).flatten(-2).transpose(1, 2)
