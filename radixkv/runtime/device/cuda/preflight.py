"""Checks of settings and ``config.json`` against the GPU that need no weights."""

from __future__ import annotations

from radixkv.checkpoints import Checkpoint
from radixkv.runtime.device.adapters.cuda.memory_size import memory_bytes
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.kv_dtype import choose_kv_dtype
from radixkv.runtime.device.machine import (
    Gpu,
    check_adapters_fit,
    check_block_tables,
    check_fp8_experts,
    check_kv_cache_dtype,
    check_max_num_seqs,
    check_page_size,
    check_states_fit,
    check_weights_fit,
    choose_dtype,
)
from radixkv.runtime.device.memory.cuda.pool_size import MemoryUse, plan_pages
from radixkv.runtime.device.memory.page_shape import PageLayout
from radixkv.runtime.device.memory.state_size import all_states_bytes
from radixkv.runtime.device.model_support import check_model
from radixkv.runtime.device.weights.open import open_weights
from radixkv.runtime.device.weights.shards import Shard


def check_for_cuda(checkpoint: Checkpoint, gpu: Gpu, settings: DeviceSettings) -> None:
    """Refuses settings that cannot work, before anything is downloaded, read or allocated.

    Args:
        checkpoint: its ``config.json`` is enough; weights are not needed.
        gpu: the GPU to use.
        settings: all of the device.

    Raises:
        CheckpointError: ``config.json`` is wrong, or needs an unsupported feature.
        ConfigError: the model does not fit the settings or the GPU.
    """
    check_kv_cache_dtype(settings.kv_cache_dtype, gpu)
    check_page_size(settings.page_size)
    check_max_num_seqs(settings.max_num_seqs)
    check_block_tables(settings.max_num_seqs, settings.max_model_len, settings.page_size)
    torch_dtype = choose_dtype(settings.dtype, checkpoint.config)
    n_ranks = settings.tensor_parallel_size
    with open_weights(
        checkpoint,
        load_format="dummy",
        dtype=torch_dtype,
        quantization=settings.quantization,
        products=("fp8", "int4"),
        shard=None if n_ranks == 1 else Shard(0, n_ranks),
        divides_head=True,
    ) as weights:
        config, n_bytes, extra_bytes = weights.config, weights.n_bytes, weights.dequantizing_bytes
        has_fp8 = weights.has_fp8
    check_model(config)
    if has_fp8 and config.experts is not None:
        check_fp8_experts(gpu)
    check_weights_fit(n_bytes + extra_bytes, gpu)
    if settings.has_adapters:
        assert settings.max_loras is not None, "a GPU has a default"
        adapter_bytes = memory_bytes(config, settings.max_loras, settings.max_lora_rank, torch_dtype)
        check_adapters_fit(adapter_bytes, n_bytes, settings.max_loras, settings.max_lora_rank, gpu)
        n_bytes += adapter_bytes
    states_bytes = 0
    if config.recurrent is not None:
        states_bytes = all_states_bytes(config.recurrent, torch_dtype, settings)
        check_states_fit(states_bytes, n_bytes, settings.max_num_seqs, gpu)
    kv_dtype = choose_kv_dtype(settings.kv_cache_dtype, torch_dtype)
    page = PageLayout.of(config, settings.page_size, kv_dtype)
    plan_pages(page, MemoryUse(gpu.total_bytes, gpu.free_bytes - n_bytes - states_bytes), settings)
