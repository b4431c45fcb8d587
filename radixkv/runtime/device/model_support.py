"""What CUDA's kernels support of a model."""

from __future__ import annotations

from radixkv.errors import ConfigError
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.model_config.states import RecurrentConfig

HEAD_SIZES = (64, 128, 256, 512)
"""Head sizes of the 16-bit attention kernels."""
MAX_FLASHINFER_HEAD_SIZE = 256
"""Largest head size of FlashInfer's kernels."""
STATE_HEAD_SIZES = (16, 32, 64, 128, 256)
"""Sizes of the kernels of layers with states: of a delta net's heads, and of the states of Mamba2."""
MAX_HEADS_PER_KV_HEAD = {64: 64, 128: 64, 256: 32, 512: 32}
"""Most query heads per KV head, by head size: they must fit one attention tile and 99 KB of shared memory."""

_USE_CPU = "set device to cpu"


def check_model(config: DecoderConfig) -> None:
    """Raises ``ConfigError`` for a checkpoint that runs on the CPU only."""
    if (recurrent := config.recurrent) is not None:
        for size in unsupported_state_sizes(recurrent):
            *some, last = STATE_HEAD_SIZES
            what = "heads" if recurrent.mamba2 is None else "states"
            raise ConfigError(
                f"this {config.architecture} has {recurrent.title} with {what} of size {size}; CUDA's kernels "
                f"take {', '.join(map(str, some))} and {last}; {_USE_CPU}"
            )
    if has_expert_groups(config):
        raise ConfigError(
            f"this {config.architecture} has a router that chooses groups of experts first, which runs on the CPU "
            f"only; {_USE_CPU}"
        )
    for n_kv_heads, head_dim in config.head_shapes:
        if head_dim not in HEAD_SIZES:
            *some, last = HEAD_SIZES
            raise ConfigError(
                f"this {config.architecture} has heads of size {head_dim}; CUDA's kernels are built for "
                f"{', '.join(map(str, some))} and {last}; {_USE_CPU}"
            )
        if config.n_heads // n_kv_heads > (limit := MAX_HEADS_PER_KV_HEAD[head_dim]):
            raise ConfigError(
                f"this {config.architecture} has {config.n_heads} heads for {n_kv_heads} KV heads; CUDA's "
                f"kernels are built for up to {limit} heads of size {head_dim} a KV head; {_USE_CPU}"
            )


def unsupported_state_sizes(config: RecurrentConfig) -> list[int]:
    """Returns the sizes of layers with states for which CUDA has no kernels."""
    sizes = [config.key_dim] if config.mamba2 is not None else [config.key_dim, config.value_dim]
    return [size for size in sizes if size not in STATE_HEAD_SIZES]


def has_expert_groups(config: DecoderConfig) -> bool:
    """Returns whether a router chooses groups of experts before it chooses experts."""
    sigmoid = None if config.experts is None else config.experts.sigmoid
    return sigmoid is not None and sigmoid.n_groups > 1


def only_triton(config: DecoderConfig) -> str | None:
    """Returns why FlashInfer does not compute a model's attention; None if it may."""
    shapes = config.head_shapes
    if len(shapes) > 1:
        return f"the layers of this {config.architecture} have heads of several shapes"
    head_dim = shapes[0][1]
    if head_dim > MAX_FLASHINFER_HEAD_SIZE:
        return (
            f"this {config.architecture} has heads of size {head_dim}, and FlashInfer's have up to "
            f"{MAX_FLASHINFER_HEAD_SIZE}"
        )
    return None
