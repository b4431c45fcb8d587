"""Reading of a checkpoint's tensors into matrices in the form that a device computes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from radixkv.runtime.device.model_config.families import WeightNames
from radixkv.runtime.device.weights.fp8_matrix import BLOCK, Fp8Matrix, Fp8Scales
from radixkv.runtime.device.weights.int4_matrix import Int4Groups, Int4Matrix
from radixkv.runtime.device.weights.layer_weights import LinearWeights, Matrix, NormWeights, Part
from radixkv.runtime.device.weights.quantization.matrices import QuantizedMatrices
from radixkv.runtime.device.weights.safetensors import TensorSource
from radixkv.runtime.device.weights.shapes import TensorShapes
from radixkv.runtime.device.weights.shards import Cut

MatrixFormat = Fp8Scales | Int4Groups
"""How matrices stay quantized in memory: in FP8 with these scales, or in 4 bits in these groups."""


@dataclass(frozen=True)
class MatrixReader:
    """Reads tensors into their places in new memory. A source may fill them later, so nothing copies from them.

    Methods that read raise ``CheckpointError`` if a tensor cannot be read.
    """

    names: WeightNames
    shapes: TensorShapes
    """Of all tensors, by full name."""
    source: TensorSource
    dtype: torch.dtype
    """Of what is not kept quantized."""
    device: torch.device
    quantized: QuantizedMatrices | None
    """The checkpoint's quantized matrices; None if it has none."""
    kept: MatrixFormat | None
    """The format of matrices that stay quantized; None: none does."""
    cuts: Mapping[str, Cut]
    """The parts of matrices that are dequantized whole."""
    dense_suffixes: tuple[str, ...] = ()
    """Ends of the names of matrices that are always kept in ``dtype``."""
    norm_dtype: torch.dtype | None = None
    """Of the weights of norms; None: ``dtype``."""

    def read(self, name: str) -> Tensor:
        """Reads a tensor by its full name, in ``dtype``."""
        return self._stacked([name])

    def norm(self, name: str) -> NormWeights:
        """Reads a norm, and its bias if it has one; ``name`` has no suffix."""
        weight = torch.empty(self.shapes[f"{name}.weight"], dtype=self.norm_dtype or self.dtype, device=self.device)
        self.fill(f"{name}.weight", weight)
        return NormWeights(weight, self.read(f"{name}.bias") if f"{name}.bias" in self.shapes else None)

    def linear(self, *parts: str) -> LinearWeights:
        """Reads matrices that share an input, stacked, and their biases if they have any; names have no suffix."""
        biases = [f"{name}.bias" for name in parts if f"{name}.bias" in self.shapes]
        names = [f"{name}.weight" for name in parts]
        weight = self.empty(self._stacked_shape(names), self.format(names))
        self._fill_stacked(names, weight)
        stack = tuple(Part(part, self.shapes[name][0]) for part, name in zip(parts, names, strict=True))
        return LinearWeights(weight, self._stacked(biases) if biases else None, stack)

    def format(self, names: Sequence[str]) -> MatrixFormat | None:
        """Returns the format in which stacked matrices stay quantized; None if they are kept in 16 bits."""
        kept = self.kept
        if kept is None or not all(name in self.shapes and self.is_layer_matrix(name) for name in names):
            return None
        if self.quantized is not None and not all(name in self.quantized for name in names):
            return None
        if any(name.endswith(self.dense_suffixes) for name in names):
            return None
        if isinstance(kept, Int4Groups):  # experts are dequantized
            experts = self.names.expert_gate.partition("{layer}")[2].partition("{expert}")[0]
            return None if any(experts in name for name in names) else kept
        if kept == "blocks" and any(self.shapes[name][0] % BLOCK for name in names[:-1]):
            return None  # the next matrix would begin within a block
        return kept

    def is_layer_matrix(self, name: str) -> bool:
        """Returns whether a tensor is a matrix of a layer, other than what weighs experts and a stack of these."""
        names = self.names
        weighing = tuple(f"{one.rpartition('{layer}')[2]}.weight" for one in (names.router, names.shared_weight))
        return name.startswith(names.layers) and len(self.shapes[name]) == 2 and not name.endswith(weighing)

    def empty(self, shape: tuple[int, ...], kept: MatrixFormat | None) -> Matrix:
        """Returns memory for a matrix, or for a stack of them, in a format of ``format``."""
        if kept is None:
            return self.dense(*shape)
        if isinstance(kept, Int4Groups):
            return Int4Matrix.allocate((shape[0], shape[1]), kept, self.device)
        return Fp8Matrix.allocate(shape, scales=kept, device=self.device)

    def dense(self, *shape: int) -> Tensor:
        """Returns memory for a tensor in ``dtype``."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def fill(self, name: str, part: Matrix) -> None:
        """Reads a tensor by its full name into ``part``.

        It is dequantized or quantized where the files have another format.
        """

        def copy(tensors: Sequence[Tensor]) -> None:
            if isinstance(part, Tensor):
                part.copy_(self._matrix(name, tensors).view(part.shape))
            else:
                self._fill_matrix(name, tensors, part)

        if isinstance(part, Tensor) and (self.quantized is None or name not in self.quantized):
            self.source.fill(name, part)
        else:
            self.source.compute(self._stored(name), copy)

    def fill_interleaved(self, name: str, parts: Sequence[Matrix], n_groups: int) -> None:
        """Reads a matrix whose rows are groups, each with some rows of each part, into these parts.

        All parts have one format. In FP8 with scales of blocks a group has whole blocks of each part.
        """

        def sort(matrix: Tensor, parts: Sequence[Tensor]) -> None:
            sizes = [len(part) // n_groups for part in parts]
            for part, group in zip(parts, matrix.view(n_groups, sum(sizes), -1).split(sizes, 1), strict=True):
                part.view(group.shape).copy_(group)

        def copy(tensors: Sequence[Tensor]) -> None:
            if dense := [part for part in parts if isinstance(part, Tensor)]:
                sort(self._matrix(name, tensors), dense)
                return
            fp8 = [part for part in parts if isinstance(part, Fp8Matrix)]
            whole = Fp8Matrix.allocate(
                self.shapes[name], scales="blocks" if fp8[0].has_blocks else "channels", device=tensors[0].device
            )
            self._fill_matrix(name, tensors, whole)
            sort(whole.values, [part.values for part in fp8])
            sort(whole.scales, [part.scales for part in fp8])

        self.source.compute(self._stored(name), copy)

    def _fill_matrix(self, name: str, tensors: Sequence[Tensor], out: Fp8Matrix | Int4Matrix) -> None:
        """Fills a matrix that stays quantized from the tensors that it is stored as."""
        if self.quantized is None:
            out.quantize(tensors[0].to(self.dtype))
        else:
            self.quantized.copy(name, tensors, out)

    def _stacked(self, names: Sequence[str]) -> Tensor:
        """Returns the named tensors concatenated along their first dimension."""
        stacked = self.dense(*self._stacked_shape(names))
        self._fill_stacked(names, stacked)
        return stacked

    def _stacked_shape(self, names: Sequence[str]) -> tuple[int, ...]:
        return sum(self.shapes[name][0] for name in names), *self.shapes[names[0]][1:]

    def _fill_stacked(self, names: Sequence[str], stacked: Matrix) -> None:
        parts = stacked.split([self.shapes[name][0] for name in names])
        for name, part in zip(names, parts, strict=True):
            self.fill(name, part)

    def _matrix(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """Returns a matrix from the tensors that it is stored as."""
        if self.quantized is None or name not in self.quantized:
            return tensors[0]
        matrix = self.quantized.dequantize(name, tensors)
        return self.cuts[name].of(matrix) if name in self.cuts else matrix

    def _stored(self, name: str) -> Sequence[str]:
        """Returns the names of the tensors that a matrix is stored as."""
        return [name] if self.quantized is None or name not in self.quantized else self.quantized.stored(name)
