"""A layer of Mamba2 on CUDA, over its kernels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from radixkv.runtime.device.model_config.states import Mamba2Config, RecurrentConfig
from radixkv.runtime.device.ops import base
from radixkv.runtime.device.ops.base import DeviceSequences, LayerStates, Rows, Sequences, n_rows_of
from radixkv.runtime.device.ops.cuda.delta_net.convolution import convolve
from radixkv.runtime.device.ops.cuda.mamba2.blocks import block_parts
from radixkv.runtime.device.ops.cuda.mamba2.gated_norm import gated_group_norm
from radixkv.runtime.device.ops.cuda.mamba2.scan import scan_blocks
from radixkv.runtime.device.ops.cuda.mamba2.step import step_tokens
from radixkv.runtime.device.weights.layer_weights import RecurrentWeights


@dataclass(frozen=True)
class Mamba2(base.RecurrentLayer):
    """A layer of Mamba2 (Dao and Gu, arXiv 2405.21060), up to the projection of its output.

    Rows of one token change their states in place. Prompts are computed in blocks of 64 positions with products on
    tensor cores. Memory: for each token of a step, some two times the size of the layer's inputs.
    """

    weights: RecurrentWeights
    """Read by kernels only: they may still be loading when this is constructed."""
    inputs: base.Linear
    config: RecurrentConfig
    mamba2: Mamba2Config
    """Of ``config``."""
    eps: float
    """Of the norm of its output."""

    def project(self, normed: Rows, out: Tensor) -> None:
        """See ``ops.base.RecurrentLayer``."""
        self.inputs(normed, out[: n_rows_of(normed)])

    def scan(self, projected: Tensor, sequences: Sequences, states: LayerStates, out: Tensor) -> None:
        """See ``ops.base.RecurrentLayer``."""
        assert isinstance(sequences, DeviceSequences), "on CUDA rows are tensors"
        config, mamba2, weights = self.config, self.mamba2, self.weights
        assert weights.skip is not None, "layers of Mamba2 have it"
        convolved = projected.new_empty(len(projected), config.n_channels)
        convolve(
            projected[:, config.n_values :],
            states.inputs,
            weights.convolution,
            sequences,
            config,
            convolved,
            weights.convolution_bias,
        )
        out = out.unflatten(1, (config.n_value_heads, config.value_dim))
        gates, memory = (weights.log_decay, weights.decay_bias), states.memory
        if len(sequences.batch_slots):
            step_tokens(convolved, projected, *gates, weights.skip, memory, sequences, config, mamba2, out)
        if (prompts := sequences.prompts) is not None:
            parts = block_parts(convolved, projected, *gates, prompts, config, mamba2)
            scan_blocks(convolved, parts, weights.skip, memory, prompts, config, sequences.n_batch_slots, out)

    def finish(self, projected: Tensor, read: Tensor) -> Tensor:
        """See ``ops.base.RecurrentLayer``."""
        config = self.config
        gate = projected[:, : config.n_values]
        gated_group_norm(read, gate, self.weights.norm, self.eps, config.n_key_heads, read)
        return read
