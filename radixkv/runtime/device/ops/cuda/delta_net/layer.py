"""A gated delta net on CUDA, over its kernels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from radixkv.runtime.device.model_config.states import RecurrentConfig
from radixkv.runtime.device.ops import base
from radixkv.runtime.device.ops.base import (
    DeviceSequences,
    LayerStates,
    Rows,
    RowScales,
    Sequences,
    as_tensor,
    n_rows_of,
)
from radixkv.runtime.device.ops.cuda.delta_net.blocks import block_parts
from radixkv.runtime.device.ops.cuda.delta_net.convolution import convolve
from radixkv.runtime.device.ops.cuda.delta_net.gated_norm import gated_norm
from radixkv.runtime.device.ops.cuda.delta_net.scan import scan_blocks
from radixkv.runtime.device.ops.cuda.delta_net.step import step_tokens
from radixkv.runtime.device.weights.layer_weights import RecurrentWeights


@dataclass(frozen=True)
class GatedDeltaNet(base.RecurrentLayer):
    """A gated delta net (Yang et al., arXiv 2412.06464), up to the projection of its output.

    Rows of one token change their states in place. Prompts are computed in blocks of 64 positions with products on
    tensor cores. Memory: for each token of a step, some two times the size of the layer's inputs.
    """

    weights: RecurrentWeights
    """Read by kernels only: they may still be loading when this is constructed."""
    inputs: base.Linear
    config: RecurrentConfig
    eps: float
    """Of the norm of its output."""
    gates: base.Linear | None = None
    """Of ``RecurrentWeights.gates``: what ``inputs`` leaves out."""

    @property
    def input_scales(self) -> RowScales | None:
        """See ``ops.base.RowReader``."""
        return self.inputs.input_scales

    @property
    def reads_unrounded(self) -> bool:
        """See ``ops.base.RowReader``."""
        return self.gates is not None

    def project(self, normed: Rows, out: Tensor) -> None:
        """See ``ops.base.RecurrentLayer``."""
        if self.gates is None:
            self.inputs(normed, out[: n_rows_of(normed)])
            return
        n_inputs = self.config.n_channels + self.config.n_values
        self.inputs(normed, out[:, :n_inputs])
        self.gates(as_tensor(normed), out[: n_rows_of(normed), n_inputs:])

    def scan(self, projected: Tensor, sequences: Sequences, states: LayerStates, out: Tensor) -> None:
        """See ``ops.base.RecurrentLayer``."""
        assert isinstance(sequences, DeviceSequences), "on CUDA rows are tensors"
        config, weights = self.config, self.weights
        convolved = projected.new_empty(len(projected), config.n_channels)
        convolve(projected, states.inputs, weights.convolution, sequences, config, convolved)
        out = out.unflatten(1, (config.n_value_heads, config.value_dim))
        gates = weights.log_decay, weights.decay_bias
        if len(sequences.batch_slots):
            step_tokens(convolved, projected, *gates, states.memory, sequences, config, out)
        if (prompts := sequences.prompts) is not None:
            parts = block_parts(convolved, projected, *gates, prompts, config)
            scan_blocks(convolved, parts, states.memory, prompts, config, sequences.n_batch_slots, out)

    def finish(self, projected: Tensor, read: Tensor) -> Tensor:
        """See ``ops.base.RecurrentLayer``."""
        config = self.config
        gate = projected[:, config.n_channels : config.n_channels + config.n_values]
        heads = read.unflatten(1, (config.n_value_heads, config.value_dim))
        gated_norm(heads, gate, self.weights.norm, self.eps, read)
        return read
