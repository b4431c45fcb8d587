"""The quantized matrices of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from radixkv.errors import CheckpointError
from radixkv.runtime.device.weights.fp8_matrix import Fp8Matrix
from radixkv.runtime.device.weights.int4_matrix import Int4Matrix
from radixkv.runtime.device.weights.quantization.int4 import Int4Scheme
from radixkv.runtime.device.weights.quantization.scheme import WeightScheme
from radixkv.runtime.device.weights.safetensors import Header, TensorViews

_E8M0_NAN = 255


class QuantizedMatrices:
    """The matrices of a checkpoint that are stored quantized, by the name that a dense one would have.

    A checkpoint may have both: a matrix is quantized if the files have the tensor that only quantized ones have.

    Args:
        scheme: the format.
        shapes: dense shapes of all tensors that the model needs, by name.
        stored: names of all tensors in the files.
        files: of the checkpoint.

    Raises:
        CheckpointError: no matrix is quantized, or one has a size that the format does not support.
    """

    def __init__(
        self,
        scheme: WeightScheme,
        shapes: Mapping[str, tuple[int, ...]],
        stored: frozenset[str],
        files: TensorViews,
    ) -> None:
        self._scheme = scheme
        self._files = files
        self._headers: dict[str, dict[str, Header]] = {}
        """Headers of the tensors of each quantized matrix."""
        self.optional: set[str] = set()
        """Names of tensors that quantized matrices may have beside these."""
        self._unused_biases: set[str] = set()
        for name, shape in shapes.items():
            base = name.removesuffix(".weight")
            if (base != name or len(shape) == 3) and _join(base, scheme.mark) in stored:
                try:
                    headers = scheme.headers(shape)
                except ValueError as error:
                    raise CheckpointError(f"{base} cannot be in the format {scheme.name}: {error}") from None
                self._headers[name] = {_join(base, suffix): header for suffix, header in headers.items()}
                optional = {_join(base, suffix) for suffix in scheme.optional()} - shapes.keys()
                self.optional |= optional
                self._unused_biases |= {each for each in optional & stored if each.endswith(".bias")}
        if not self._headers:
            raise CheckpointError(
                f"config.json has a quantization_config of {scheme.name}, but no matrix has a {scheme.mark}; "
                "fetch the checkpoint again"
            )

    @property
    def scheme_name(self) -> str:
        """Name of the format."""
        return self._scheme.name

    def __contains__(self, name: str) -> bool:
        """Returns whether a matrix is quantized, by the name that a dense one would have."""
        return name in self._headers

    def replace(self, headers: Mapping[str, Header]) -> dict[str, Header]:
        """Returns headers in which each quantized matrix is replaced by the tensors that it is stored as."""
        replaced = {name: header for name, header in headers.items() if name not in self._headers}
        for stored in self._headers.values():
            replaced |= stored
        return replaced

    def check_values(self) -> None:
        """Reads all scales, and biases that the model has not.

        Raises:
            CheckpointError: a scale is not finite, or such a bias is not zero.
        """
        for name in self._headers:
            scales = _join(name.removesuffix(".weight"), self._scheme.scales)
            if not _are_finite(self._files.view(scales)):
                raise CheckpointError(f"{scales} has values that are not finite; fetch the checkpoint again")
        for bias in sorted(self._unused_biases):
            if self._files.view(bias).any():
                raise CheckpointError(f"{bias} is not zero, and config.json does not call for a bias")

    def stored(self, name: str) -> tuple[str, ...]:
        """Returns the names of the tensors that a matrix is stored as."""
        return tuple(self._headers[name])

    def cut(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Returns the shapes of the tensors that a matrix is stored as: of each, all of it and a part.

        Args:
            name: of the matrix.
            shape: of the part, for which ``can_cut`` holds.
        """
        parts = self._scheme.headers(shape).values()
        return {
            stored: (header.shape, part.shape)
            for (stored, header), part in zip(self._headers[name].items(), parts, strict=True)
        }

    def dequantize(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """Returns a matrix in float32, on the device of its tensors. Raises ``CheckpointError`` if they are wrong.

        Args:
            name: of the matrix.
            tensors: in the order of ``stored``.
        """
        try:
            return self._scheme.dequantize(self._reader(name, tensors))
        except ValueError as error:
            raise CheckpointError(f"{name.removesuffix('.weight')}: {error}; fetch the checkpoint again") from None

    def copy(self, name: str, tensors: Sequence[Tensor], out: Fp8Matrix | Int4Matrix) -> None:
        """Copies a matrix with its scales, and with its zero points if it has any.

        Args:
            name: of the matrix.
            tensors: in the order of ``stored``.
            out: where to; of the format of the checkpoint.
        """
        read = self._reader(name, tensors)
        if isinstance(out, Fp8Matrix):
            out.values.copy_(read("weight"))
            scales = read(self._scheme.scales).float()
            out.scales.copy_(scales if out.has_blocks else scales.view(-1).expand(len(out.scales)))
            return
        assert isinstance(self._scheme, Int4Scheme)
        self._scheme.copy_int4(read, out)

    def _reader(self, name: str, tensors: Sequence[Tensor]) -> Callable[[str], Tensor]:
        """Returns what finds a matrix's tensor by suffix."""
        base = name.removesuffix(".weight")
        by_name = dict(zip(self._headers[name], tensors, strict=True))
        return lambda suffix: by_name[_join(base, suffix)]


def _are_finite(scales: Tensor) -> bool:
    """Returns whether scales are finite. Bytes are powers of two (e8m0), of which the highest is not a number."""
    return bool((scales != _E8M0_NAN if scales.dtype == torch.uint8 else scales.isfinite()).all())


def _join(base: str, suffix: str) -> str:
    return base + suffix if suffix.startswith("_") else f"{base}.{suffix}"
