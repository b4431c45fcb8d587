"""The sizes of a model's weights and pages on CUDA, from its files and without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixkv.checkpoints import Checkpoint
from radixkv.runtime.device.kv_dtype import choose_kv_dtype, kv_dtype_name
from radixkv.runtime.device.machine import choose_dtype
from radixkv.runtime.device.memory.page_shape import PageLayout
from radixkv.runtime.device.memory.state_size import state_bytes
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.model_support import check_model
from radixkv.runtime.device.weights.open import open_weights
from radixkv.runtime.device.weights.shards import Shard


@dataclass(frozen=True)
class ModelSize:
    """What a model takes of a GPU's memory; where several ranks compute it, of each rank's GPU."""

    config: DecoderConfig
    dtype: torch.dtype
    """Dtype of activations, and of weights that are not quantized."""
    n_values: int
    """Values of all weights."""
    n_quantized_values: int
    """Values that are in 8 or 4 bits."""
    has_fp8: bool
    """Whether the quantized ones are in 8 bits."""
    weight_bytes: int
    """All weights, with the scales of quantized ones."""
    loading_bytes: int
    """Memory for converting weights while they are loaded."""
    state_bytes: int
    """The states of one sequence; 0 where all layers have K and V."""
    n_ranks: int
    """Ranks that compute the model together."""
    n_page_parts: int
    """Different parts of a page that they have."""

    @property
    def dtype_name(self) -> str:
        """The dtype as settings name it."""
        return kv_dtype_name(self.dtype)

    def page(self, page_size: int, kv_cache_dtype: str) -> PageLayout:
        """Returns the layout of a page of ``page_size`` tokens for a value of ``--kv-cache-dtype``."""
        return PageLayout.of(self.config, page_size, choose_kv_dtype(kv_cache_dtype, self.dtype))


def model_size(
    checkpoint: Checkpoint, quantization: str | None = None, n_ranks: int = 1, *, reads_files: bool = True
) -> ModelSize:
    """Returns the sizes that a model has on CUDA with ``--dtype auto``.

    Reads the headers of the weight files where they are, and a head that may be tied. Otherwise all follows from
    ``config.json``, and every matrix that the checkpoint's format may quantize counts as quantized.

    Args:
        checkpoint: its ``config.json`` is enough.
        quantization: ``fp8`` rounds the layers' matrices to FP8; None leaves the checkpoint's own format.
        n_ranks: ranks among which the model is divided; all have the same sizes.
        reads_files: whether files of weights are opened, if there are any, and compared with ``config.json``.

    Raises:
        CheckpointError: ``config.json`` or a weight file is wrong, or needs an unsupported feature.
        ConfigError: ``quantization`` does not fit the checkpoint, its heads run on the CPU only, or it cannot be
            divided among as many ranks.
    """
    dtype = choose_dtype("auto", checkpoint.config)
    whole = DecoderConfig.parse(checkpoint.config, checkpoint.folder / "config.json")
    with open_weights(
        checkpoint,
        load_format="auto" if checkpoint.has_weights and reads_files else "dummy",
        dtype=dtype,
        quantization=quantization,
        products=("fp8", "int4"),
        shard=None if n_ranks == 1 else Shard(0, n_ranks),
        divides_head=True,
    ) as weights:
        check_model(weights.config)
        return ModelSize(
            config=weights.config,
            dtype=dtype,
            n_values=weights.n_values,
            n_quantized_values=weights.n_quantized_values,
            has_fp8=weights.has_fp8,
            weight_bytes=weights.n_bytes,
            loading_bytes=weights.dequantizing_bytes,
            state_bytes=0 if (recurrent := weights.config.recurrent) is None else state_bytes(recurrent, dtype),
            n_ranks=n_ranks,
            n_page_parts=whole.n_page_parts(n_ranks),
        )
