"""The size of the states of recurrent layers."""

from __future__ import annotations

import torch

from radixkv.errors import ConfigError
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.model_config.states import RecurrentConfig


def state_bytes(config: RecurrentConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of one sequence's states."""
    n_inputs = (config.n_taps - 1) * config.n_channels
    n_memory = config.n_value_heads * config.key_dim * config.value_dim
    return len(config.layers) * (n_inputs * dtype.itemsize + n_memory * torch.float32.itemsize)


def all_states_bytes(config: RecurrentConfig, dtype: torch.dtype, settings: DeviceSettings) -> int:
    """Returns the bytes of the states of all batch slots and of the tree. Raises as ``count_states`` does."""
    return (settings.max_num_seqs + count_states(config, dtype, settings)) * state_bytes(config, dtype)


def count_states(config: RecurrentConfig, dtype: torch.dtype, settings: DeviceSettings) -> int:
    """Returns how many states the tree can have. Raises ``ConfigError`` if its memory is less than one."""
    n_bytes = state_bytes(config, dtype)
    n_states = settings.state_memory_bytes // n_bytes
    if settings.state_memory_bytes and not n_states:
        raise ConfigError(
            f"state_memory_bytes is {settings.state_memory_bytes}; the states of one sequence take {n_bytes} "
            "bytes; set it (--state-memory) to that or more"
        )
    return n_states
