"""Products and MLPs whose outputs several GPUs sum, in one kernel with the norm that follows."""

from __future__ import annotations

import torch
from torch import Tensor

from radixkv.runtime.device.ops.base import Norm, NormReader, RoutedExperts, Rows, RowScales, n_rows_of
from radixkv.runtime.device.ops.cuda.collectives import CudaCollectives
from radixkv.runtime.device.ops.cuda.fp8_rows import rows_of
from radixkv.runtime.device.ops.summed import PartMemory, SummedPart


class CudaSummed(SummedPart):
    """A product or an MLP whose outputs are summed over all GPUs.

    Args:
        collectives: of the rank; connected before the first call.
        part: computes this rank's part of each output.
        memory: which of the memories for parts is used.
    """

    def __init__(self, collectives: CudaCollectives, part: NormReader, memory: PartMemory) -> None:
        self._part = part
        self._collectives = collectives
        self._memory = memory

    @property
    def input_scales(self) -> RowScales | None:
        """See ``ops.base.NormReader``."""
        return self._part.input_scales

    @property
    def reads_unrounded(self) -> bool:
        """See ``ops.base.NormReader``."""
        return self._part.reads_unrounded

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.NormReader``."""
        part = self._compute(x, n_rows_of(x))
        if out is None:
            out = part.new_empty(part.shape)
        self._collectives.sum_parts(self._memory, out)
        return out

    def add_and_norm(self, x: Rows, residual: Tensor, norm: Norm) -> Rows:
        """See ``ops.base.NormReader``."""
        fields = norm.fused
        if fields is None:
            return norm.add(self(x), residual)
        self._compute(x, len(residual))
        out = rows_of(fields, residual)
        self._collectives.sum_parts(self._memory, out, residual, fields)
        return out

    def _compute(self, x: Rows, n_rows: int) -> Tensor:
        return self._part(x, self._collectives.part(self._memory, n_rows))


class CudaSummedExperts(RoutedExperts):
    """A mixture of experts whose outputs are summed over all GPUs.

    Args:
        collectives: of the rank; connected before the first call.
        part: computes this rank's part of each output.
        memory: which of the memories for parts is used.
    """

    def __init__(self, collectives: CudaCollectives, part: RoutedExperts, memory: PartMemory) -> None:
        self._part = part
        self._collectives = collectives
        self._memory = memory

    def mixed(self, x: Tensor, routed: Tensor, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.RoutedExperts``."""
        self._part.mixed(x, routed, self._collectives.part(self._memory, len(x)))
        out = torch.empty_like(x) if out is None else out
        self._collectives.sum_parts(self._memory, out)
        return out
