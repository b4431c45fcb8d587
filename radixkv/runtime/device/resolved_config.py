"""The settings of an engine after one look at the machine, from which its parts take fields."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.errors import ConfigError
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.machine import Machine
from radixkv.settings.config import CacheConfig, Device, EngineConfig

_MAX_NUM_SEQS: dict[Device, int] = {"cpu": 256, "cuda": 512}
MAX_NUM_BATCHED_TOKENS: dict[Device, int] = {"cpu": 2048, "cuda": 8192}
_CPU_ROWS_WITH_STATES = 16
"""Each sequence has states of some 20 to 50 MB."""
_MAX_NUM_BATCHED_TOKENS_WITH_STATES: dict[Device, int] = {"cpu": 144, "cuda": 8192}
"""The CPU takes 1 to 2 ms for a token in each layer with states, and between steps nothing else is done.

Chunks of 128 tokens, a multiple of 64, fit beside 16 rows of answers."""
_CPU_POOL_BYTES = 1 << 30
CPU_STATE_BYTES = 1 << 30
_CACHE_DIR_BYTES = 64 << 30
_MAX_CPU_LORAS = 64
"""Adapters in the memory of a GPU's host: 5 GB of adapters of an 8B model, of rank 16 in 16 bits."""
GPU_MEMORY_UTILIZATION = 0.9
"""Share of a GPU's memory that an engine uses by default."""


@dataclass(frozen=True)
class StateRoom:
    """The states of a model with recurrent layers, and the memory of a GPU for them and the pool."""

    state_bytes: int
    """Bytes of the states of one sequence."""
    free_bytes: int
    """What the weights leave of the memory that an engine may use."""

    @property
    def n_rows(self) -> int:
        """Rows by default: as many as a fifth of the memory has states for, but from 16 to 256."""
        return min(max(self.free_bytes // 5 // self.state_bytes, 16), 256)

    @property
    def tree_bytes(self) -> int:
        """Memory of the states in the tree by default: a fifth."""
        return max(self.free_bytes // 5, self.state_bytes)


@dataclass(frozen=True)
class ResolvedConfig:
    """All settings of an engine, with the defaults that depend on device and checkpoint."""

    device: Device
    machine: Machine | None
    """What the look at the machine found; None if the settings asked for the CPU."""
    device_settings: DeviceSettings
    cache_dir_bytes: int
    """Maximum size of the files in ``cache_dir``."""
    config: EngineConfig
    """The settings as the user gave them: a field is read here if it depends on neither device nor checkpoint."""

    @property
    def max_adapters(self) -> int | None:
        """Most adapters that are loaded at once; None: any number."""
        adapters = self.config.adapters
        if adapters.max_cpu_loras is not None or self.device == "cpu":
            return adapters.max_cpu_loras
        return max(_MAX_CPU_LORAS, self.device_settings.max_loras or 0, len(adapters.lora_modules))


def with_defaults(
    config: EngineConfig,
    device: Device,
    max_position_embeddings: int,
    machine: Machine | None = None,
    *,
    has_states: bool = False,
    room: StateRoom | None = None,
) -> ResolvedConfig:
    """Returns the settings with their defaults for a device and a checkpoint.

    Args:
        config: as the user gave them.
        device: on which to compute.
        max_position_embeddings: the checkpoint's own limit of ``max_model_len``.
        machine: what a look at the machine found.
        has_states: whether layers have states in place of K and V.
        room: for these states on CUDA.

    Raises:
        ConfigError: the pool's size is set twice.
    """
    model, cache, scheduler = config.model, config.cache, config.scheduler
    _check_pool_size(cache.kv_cache_memory_bytes, cache.max_total_tokens)
    n_rows, n_tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    if n_rows is None:
        n_rows = _MAX_NUM_SEQS[device]
        if has_states:
            n_rows = _CPU_ROWS_WITH_STATES if room is None else room.n_rows
        if n_tokens is not None:
            n_rows = min(n_rows, n_tokens + 1 - cache.page_size)
    if n_tokens is None:
        n_tokens = (_MAX_NUM_BATCHED_TOKENS_WITH_STATES if has_states else MAX_NUM_BATCHED_TOKENS)[device]
        n_tokens = max(n_tokens, n_rows - 1 + cache.page_size)
    n_bytes, utilization = cache.kv_cache_memory_bytes, cache.gpu_memory_utilization
    return ResolvedConfig(
        device=device,
        machine=machine,
        device_settings=DeviceSettings(
            page_size=cache.page_size,
            max_num_seqs=n_rows,
            max_num_batched_tokens=n_tokens,
            max_model_len=model.max_model_len or max_position_embeddings,
            kv_cache_memory_bytes=_CPU_POOL_BYTES if n_bytes is None and device == "cpu" else n_bytes,
            max_total_tokens=cache.max_total_tokens,
            state_memory_bytes=_state_memory_bytes(cache, room) if has_states else 0,
            gpu_memory_utilization=GPU_MEMORY_UTILIZATION if utilization is None else utilization,
            dtype=model.dtype,
            kv_cache_dtype=cache.kv_cache_dtype,
            quantization=model.quantization,
            load_format=model.load_format,
            attention_backend=model.attention_backend,
            tensor_parallel_size=model.tensor_parallel_size,
            enforce_eager=model.enforce_eager,
            task=model.task,
        ),
        cache_dir_bytes=_CACHE_DIR_BYTES if cache.cache_dir_bytes is None else cache.cache_dir_bytes,
        config=config,
    )


def _state_memory_bytes(cache: CacheConfig, room: StateRoom | None) -> int:
    if not cache.enable_prefix_caching:
        return 0
    if cache.state_memory_bytes is not None:
        return cache.state_memory_bytes
    return CPU_STATE_BYTES if room is None else room.tree_bytes


def _check_pool_size(n_bytes: int | None, n_tokens: int | None) -> None:
    if n_tokens is not None and n_bytes is not None:
        raise ConfigError(
            f"kv_cache_memory_bytes {n_bytes} and max_total_tokens {n_tokens} both set the size of the KV pool; "
            "set only one of them"
        )
