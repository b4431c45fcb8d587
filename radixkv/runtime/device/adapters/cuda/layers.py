"""Products whose rows may belong to adapters, and norms that are read by them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from radixkv.runtime.device.adapters.cuda.blocks import StepAdapters
from radixkv.runtime.device.adapters.cuda.memory import ProductSlots
from radixkv.runtime.device.ops.base import Linear as BaseLinear
from radixkv.runtime.device.ops.base import Norm, RmsFields, RowReader, Rows, RowScales, as_tensor
from radixkv.runtime.device.ops.cuda.layers import CudaLinear
from radixkv.runtime.device.ops.cuda.lora import add_adapters


class LoraLinear(CudaLinear):
    """A product to which the adapters of a step's rows add theirs.

    In a step without adapters it is the product of the base model, fused with what is beside it.

    Args:
        base: the product of the base model.
        slots: what adapters add to it.
        step: the step that is enqueued.
    """

    def __init__(self, base: CudaLinear, slots: ProductSlots, step: StepAdapters) -> None:
        self._base = base
        self._slots = slots
        self._step = step

    @property
    def input_scales(self) -> RowScales | None:
        """See ``ops.base.RowReader``."""
        return self._base.input_scales

    @property
    def reads_unrounded(self) -> bool:
        """See ``ops.base.RowReader``. Adapters do."""
        return self._step.blocks is not None

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.Linear``."""
        y = self._base(x, out)
        if (blocks := self._step.blocks) is not None:
            add_adapters(as_tensor(x), self._slots.matrices, blocks, y)
        return y

    def add_and_norm(self, x: Rows, residual: Tensor, norm: Norm) -> Rows:
        """See ``ops.base.Linear``."""
        if self._step.blocks is None:
            return self._base.add_and_norm(x, residual, norm)
        return norm.add(self(x), residual)

    def gated(self, x: Rows, reader: BaseLinear) -> Rows:
        """See ``CudaLinear``."""
        if self._step.blocks is None:
            return self._base.gated(x, reader)
        return super().gated(x, reader)


@dataclass(frozen=True)
class FollowingNorm(Norm):
    """A norm that writes FP8, and in the steps in which its reader reads that also the rows as they were before."""

    alone: Norm
    """Writes FP8 alone."""
    with_unrounded: Norm
    """Writes both."""
    reader: RowReader

    @property
    def fused(self) -> RmsFields | None:
        """See ``ops.base.Norm``."""
        return self._current.fused

    def __call__(self, x: Tensor) -> Rows:
        """See ``ops.base.Norm``."""
        return self._current(x)

    def add(self, x: Tensor, residual: Tensor) -> Rows:
        """See ``ops.base.Norm``."""
        return self._current.add(x, residual)

    @property
    def _current(self) -> Norm:
        return self.with_unrounded if self.reader.reads_unrounded else self.alone
