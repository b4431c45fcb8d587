"""An adapter's matrices as tensors, and the part of them that a rank has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from radixkv.checkpoints.adapters import AdapterFolder, LoraShape
from radixkv.checkpoints.adapters.folder import StoredMatrix
from radixkv.runtime.device.weights.shards import Cut

_DTYPES = MappingProxyType({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16})


@dataclass(frozen=True)
class AdapterMatrices:
    """The matrices of an adapter, or a rank's part of them.

    A rank that has some outputs of a module has these rows of B, and A whole. One that has some inputs has these
    columns of A, and B whole: it adds its part of ``B @ A @ x`` to its part of the module's product, before all
    ranks' parts are summed.
    """

    folder: AdapterFolder
    """Whose modules have the names of the base model."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """The rank's part of the base model's matrix [out, in] of each module, by the module's name; a rank has all of
    those that are left out."""

    @property
    def digest(self) -> str:
        """See ``AdapterFolder.digest``. All ranks have that of the whole adapter."""
        return self.folder.digest

    @property
    def invocation_tokens(self) -> tuple[int, ...] | None:
        """See ``AdapterFolder.invocation_tokens``."""
        return self.folder.invocation_tokens

    @property
    def modules(self) -> Mapping[str, LoraShape]:
        """See ``AdapterFolder.modules``, with the inputs and outputs of the whole model."""
        return self.folder.modules

    @property
    def n_values(self) -> int:
        """Values of all matrices, or of the rank's parts."""
        return sum(shape.rank * sum(self._part_of(name, shape)) for name, shape in self.modules.items())

    def pair(self, module: str) -> tuple[Tensor, Tensor]:
        """Returns A [rank, in] and B [out, rank] of a module as stored, in float32, float16 or bfloat16 on the CPU.

        They share the folder's memory, may have gaps between their rows, and must not be changed. Cost: no copy,
        but of a matrix at an odd offset.

        Args:
            module: one of ``modules``.
        """
        a, b = map(_tensor, self.folder.stored(module))
        cut = self.cuts.get(module)
        if cut is None:
            return a, b
        return (a, cut.of(b)) if cut.dimension == 0 else (cut.of(a), b)

    def _part_of(self, module: str, shape: LoraShape) -> list[int]:
        """Returns the outputs and inputs of a module that the rank has."""
        sizes = [shape.n_out, shape.n_in]
        if (cut := self.cuts.get(module)) is not None:
            sizes[cut.dimension] = cut.size
        return sizes


def _tensor(matrix: StoredMatrix) -> Tensor:
    # Bytes first: a matrix may begin anywhere in the file, which only a copy aligns.
    values = torch.frombuffer(matrix.content, dtype=torch.uint8)
    dtype = _DTYPES[matrix.dtype]
    aligned = values if values.data_ptr() % dtype.itemsize == 0 else values.clone()
    return aligned.view(dtype).view(matrix.shape)
