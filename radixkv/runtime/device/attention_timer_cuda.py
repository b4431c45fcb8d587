"""How long the device spends on attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from radixkv.runtime.device.attention.cuda.base import LayerAttention
from radixkv.runtime.device.ops.cuda.clock import stamp


class AttentionTimer:
    """Times one layer's attention in each step, on the GPU, and takes it for that of every layer.

    CUDA's events would not do: those in a graph are recorded anew by its next replay, which may run before the host
    has read them. The layer is in the middle, as steps with prompts compute only a part of the last one. What it
    gives is an estimate where only some layers have windows, and too much where a step that is no graph is so small
    that the GPU waits for the host's launches.

    Args:
        n_layers: of the model.
        times: [2] int64 on the device, which stays where it is: nanoseconds at which attention began and ended.
    """

    def __init__(self, n_layers: int, times: Tensor) -> None:
        self._n_layers = n_layers
        self._layer = (n_layers - 1) // 2
        self._times = times

    def timed(self, attention: LayerAttention) -> LayerAttention:
        """The same attention, with a tiny kernel before and one behind that of the timed layer."""
        return _Timed(attention, self._layer, self._times)

    def seconds(self, times: NDArray[np.int64]) -> float:
        """What the attention of all layers took, by a step's copy of the times."""
        begun, ended = times.tolist()
        return float(ended - begun) * 1e-9 * self._n_layers


@dataclass(frozen=True)
class _Timed:
    attention: LayerAttention
    layer: int
    times: Tensor

    def run(self, layer: int, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        if layer != self.layer:
            self.attention.run(layer, q, k_cache, v_cache, out)
            return
        stamp(self.times, 0)
        self.attention.run(layer, q, k_cache, v_cache, out)
        stamp(self.times, 1)
