"""What a quantized checkpoint stores instead of a matrix, and the matrix that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from radixkv.runtime.device.weights.safetensors import Header


class WeightScheme(Protocol):
    """A format of quantized matrices.

    Names of tensors are suffixes: a matrix ``model.layers.0.mlp.up_proj`` has a tensor of that name, a dot and the
    suffix; without the dot if the suffix begins with an underscore.
    """

    @property
    def name(self) -> str:
        """Such as ``fp8``."""
        ...

    @property
    def mark(self) -> str:
        """Suffix of a tensor that each quantized matrix has, and no other."""
        ...

    @property
    def scales(self) -> str:
        """Suffix of the scales."""
        ...

    @property
    def unit(self) -> tuple[int, int | None]:
        """Output channels, and inputs, of which a part of the stored tensors has a multiple; None: it has all."""
        ...

    def headers(self, shape: tuple[int, ...]) -> Mapping[str, Header]:
        """Returns the stored tensors by suffix.

        Args:
            shape: of the matrix, [n_out, n_in], or of all experts' matrices, [experts, n_in, n_out].

        Raises:
            ValueError: a matrix of that size cannot be quantized; the text says why.
        """
        ...

    def optional(self) -> frozenset[str]:
        """Returns suffixes of further tensors that a matrix may have, which are not used. A bias must be zero."""
        ...

    def dequantize(self, read: Callable[[str], Tensor]) -> Tensor:
        """Returns the matrix or matrices in float32, on the device of the tensors.

        Args:
            read: returns a tensor of the matrix by suffix.

        Raises:
            ValueError: values contradict each other; the text says how.
        """
        ...


def can_cut(scheme: WeightScheme, shape: tuple[int, ...], part: tuple[int, ...]) -> bool:
    """Returns whether the stored tensors of a matrix can be cut into those of equal parts of it.

    Args:
        scheme: its format.
        shape: of the matrix or the matrices, as in ``WeightScheme.headers``.
        part: shape of each part.
    """
    outputs_and_inputs = (0, 1) if len(shape) == 2 else (2, 1)
    return all(
        part[dimension] == shape[dimension] or (unit is not None and part[dimension] % unit == 0)
        for dimension, unit in zip(outputs_and_inputs, scheme.unit, strict=True)
    )
