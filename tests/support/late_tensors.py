"""Tensors that are loaded when a test says so, as they come late on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from radixkv.runtime.device.weights.safetensors import TensorSource

_NO_CODE = 0x55
"""What integers have until they are loaded."""


class LateTensors:
    """A ``TensorSource`` that loads only when it is told to; until then numbers that are filled are NaN."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._loads: list[Callable[[], None]] = []

    def fill(self, name: str, out: Tensor) -> None:
        out.fill_(float("nan") if out.is_floating_point() else _NO_CODE)
        self._loads.append(partial(self._source.fill, name, out))

    def compute(self, names: Sequence[str], use: Callable[[Sequence[Tensor]], None]) -> None:
        self._loads.append(partial(self._source.compute, names, use))

    def load(self) -> None:
        for load in self._loads:
            load()
