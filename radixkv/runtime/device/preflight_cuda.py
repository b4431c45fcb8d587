"""Checks of settings and ``config.json`` against the GPU that need no weights."""

from __future__ import annotations

from radixkv.checkpoints import Checkpoint
from radixkv.runtime.device import machine_cuda
from radixkv.runtime.device.kv_dtype import choose_kv_dtype
from radixkv.runtime.device.kv_pool_cpu import PageShape
from radixkv.runtime.device.pool_size_cuda import MemoryUse, plan_pages
from radixkv.runtime.device.weights.weights import open_weights


def check_for_cuda(
    checkpoint: Checkpoint,
    gpu: machine_cuda.Gpu,
    *,
    page_size: int,
    max_rows: int,
    max_model_len: int,
    dtype: str,
    quantization: str | None,
    kv_cache_dtype: str,
    kv_cache_memory_bytes: int | None,
    max_total_tokens: int | None,
    gpu_memory_utilization: float,
) -> None:
    """Refuses settings that cannot work, before anything is downloaded, read or allocated.

    Args:
        checkpoint: its ``config.json`` is enough; weights are not needed.
        gpu: the GPU to use.
        page_size: tokens per page.
        max_rows: most rows of a step.
        max_model_len: most positions of a sequence.
        dtype: the setting, such as ``auto``.
        quantization: the format to round the weights to, or None.
        kv_cache_dtype: the setting, such as ``fp8``.
        kv_cache_memory_bytes: size of the KV pool, or None.
        max_total_tokens: size of the KV pool in tokens, or None.
        gpu_memory_utilization: share of the GPU's memory that may be used.

    Raises:
        CheckpointError: ``config.json`` is wrong, or needs an unsupported feature.
        ConfigError: the model does not fit the settings or the GPU.
    """
    machine_cuda.check_kv_cache_dtype(kv_cache_dtype, gpu)
    machine_cuda.check_page_size(page_size)
    machine_cuda.check_max_num_seqs(max_rows)
    machine_cuda.check_block_tables(max_rows, max_model_len, page_size)
    torch_dtype = machine_cuda.choose_dtype(dtype, checkpoint.config)
    with open_weights(
        checkpoint, load_format="dummy", dtype=torch_dtype, quantization=quantization, products=("fp8", "int4")
    ) as weights:
        config, n_bytes, extra_bytes = weights.config, weights.n_bytes, weights.dequantizing_bytes
        has_fp8 = weights.has_fp8
    machine_cuda.check_model(config)
    if has_fp8 and config.experts is not None:
        machine_cuda.check_fp8_experts(gpu)
    machine_cuda.check_weights_fit(n_bytes + extra_bytes, gpu)
    kv_dtype = choose_kv_dtype(kv_cache_dtype, torch_dtype)
    plan_pages(
        PageShape(config.n_layers, config.n_kv_heads, page_size, config.head_dim, kv_dtype),
        MemoryUse(gpu.total_bytes, gpu.free_bytes - n_bytes),
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        max_total_tokens=max_total_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        max_model_len=max_model_len,
    )
