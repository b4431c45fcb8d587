"""The size of one token's keys and values."""

from __future__ import annotations

from radixkv.checkpoints import resolve

BYTES_PER_VALUE = 2
"""Size of a bfloat16 or float16 value."""


def kv_bytes_per_token(model: str) -> int:
    """Returns the bytes of K and V of one token in all layers, in 16 bits. Reads the config only; imports torch.

    Raises:
        CheckpointError: the model does not exist, or radixkv does not support it.
    """
    # Imported here because it imports torch, which takes longer than replaying most traces.
    from radixkv.runtime.device.model_config.config import DecoderConfig

    checkpoint = resolve(model, load_format="dummy")
    config = DecoderConfig.parse(checkpoint.config, checkpoint.folder / "config.json")
    return 2 * config.n_layers * config.n_kv_heads * config.head_dim * BYTES_PER_VALUE
