"""What a token's keys and values weigh."""

from __future__ import annotations

from radixkv.checkpoints import resolve

BYTES_A_NUMBER = 2
"""Of bfloat16 and float16."""


def kv_bytes_per_token(model: str) -> int:
    """Bytes of K and V of one token in all layers, 16 bits a number. Reads the config only; loads torch.

    Raises:
        CheckpointError: there is no such model, or it is none that radixkv runs.
    """
    # Imported when needed: with it comes torch, which takes longer to import than most traces to replay.
    from radixkv.runtime.device.spec.config import DecoderConfig

    checkpoint = resolve(model, load_format="dummy")
    config = DecoderConfig.parse(checkpoint.config, checkpoint.folder / "config.json")
    return 2 * config.n_layers * config.n_kv_heads * config.head_dim * BYTES_A_NUMBER
