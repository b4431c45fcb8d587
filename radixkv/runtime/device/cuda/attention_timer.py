"""Measurement of the GPU time spent in attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from radixkv.runtime.device.attention.base import LayerAttention
from radixkv.runtime.device.ops.cuda.clock import stamp


class AttentionTimer:
    """Times one layer's attention in each step on the GPU, and multiplies it by the number of layers.

    CUDA events would not work: a graph's next replay records its events again, perhaps before the host has read
    them. The timed layer is in the middle, because steps with prompts compute only a part of the last layer. The
    result is an estimate where only some layers have windows. It is too large for a step without a graph that is so
    small that the GPU waits for the host's launches.

    Args:
        n_layers: layers of the model.
        times: [2] int64 on the device, at a fixed address: nanoseconds at which attention began and ended.
    """

    def __init__(self, n_layers: int, times: Tensor) -> None:
        self._n_layers = n_layers
        self._layer = (n_layers - 1) // 2
        self._times = times

    def timed(self, attention: LayerAttention) -> LayerAttention:
        """Wraps ``attention`` so that a tiny kernel before and after the timed layer records the time."""
        return _Timed(attention, self._layer, self._times)

    def seconds(self, times: NDArray[np.int64]) -> float:
        """Returns the seconds that attention took in all layers, given a step's copy of ``times``."""
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
