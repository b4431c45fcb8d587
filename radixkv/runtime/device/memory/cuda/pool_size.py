"""The number of pages of the KV pool that fit the GPU beside weights and workspace."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixkv.errors import ConfigError
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.memory.page_shape import SizedPage, count_pages

RESERVE_BYTES = 512 << 20
"""Bytes never given to the pool: libraries take some at their first call, and the allocator fragments some."""
_GIB = 1 << 30


@dataclass(frozen=True)
class MemoryUse:
    """The GPU's memory before the pool is allocated; weights and buffers count as used."""

    total_bytes: int
    free_bytes: int
    """Bytes that neither this process nor others use."""
    later_bytes: int = 0
    """Bytes that the largest step and CUDA graphs will take beside the pool."""


def measure_memory(device: torch.device, later_bytes: int = 0) -> MemoryUse:
    """Returns the current memory use. Memory cached by torch's allocator counts as used. Waits for the device."""
    torch.cuda.synchronize(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return MemoryUse(total_bytes, free_bytes, later_bytes)


def plan_pages(page: SizedPage, memory: MemoryUse, settings: DeviceSettings) -> int:
    """Returns the number of pages of the pool, not counting its zero page.

    ``max_total_tokens`` decides if it is given, else ``kv_cache_memory_bytes``. Otherwise the pool gets
    ``gpu_memory_utilization`` of the GPU's memory minus what is used already, also by other processes, and minus
    what the largest step and the graphs will take. ``RESERVE_BYTES`` always stay free.

    Args:
        page: size of one page.
        memory: the GPU's memory before the pool is allocated.
        settings: size of the pool, or share of the GPU's memory, and longest sequence.

    Raises:
        ConfigError: the pool does not fit, or cannot hold one request of ``max_model_len`` tokens. The second is
            not checked with ``max_total_tokens``: requests that are too long are then refused one by one, as on
            the CPU.
    """
    n_bytes, max_total_tokens = settings.kv_cache_memory_bytes, settings.max_total_tokens
    share, max_model_len = settings.gpu_memory_utilization, settings.max_model_len
    if max_total_tokens is not None or n_bytes is not None:
        n_pages = count_pages(page, n_bytes or 0, max_total_tokens)
        _check_fits(n_pages, page, memory)
        remedy = "kv_cache_memory_bytes"
    else:
        n_pages = _usable_bytes(memory, share) // page.n_bytes - 1
        if n_pages < 1:
            raise ConfigError(
                f"gpu_memory_utilization {share:g} leaves no room for a KV pool: of the GPU's "
                f"{_gib(memory.total_bytes)}, weights, workspace and other processes take "
                f"{_gib(memory.total_bytes - memory.free_bytes + memory.later_bytes)}; set it higher, set "
                "max_num_batched_tokens or max_num_seqs lower, or take a smaller model"
            )
        remedy = "gpu_memory_utilization"
    if max_total_tokens is None and n_pages * page.page_size < max_model_len:
        raise ConfigError(
            f"the KV pool holds {n_pages * page.page_size} tokens, fewer than max_model_len {max_model_len}; set "
            f"max_model_len to at most {n_pages * page.page_size}, or {remedy} higher"
        )
    return n_pages


def _usable_bytes(memory: MemoryUse, share: float) -> int:
    """Returns the bytes that the pool may take; negative if other memory exceeds ``share``."""
    ceiling = min(int(memory.total_bytes * share), memory.total_bytes - RESERVE_BYTES)
    return ceiling - (memory.total_bytes - memory.free_bytes) - memory.later_bytes


def _check_fits(n_pages: int, page: SizedPage, memory: MemoryUse) -> None:
    n_bytes = (n_pages + 1) * page.n_bytes
    usable = max(0, _usable_bytes(memory, 1.0))
    if n_bytes > usable:
        raise ConfigError(
            f"a KV pool of {_gib(n_bytes)} does not fit: weights and workspace leave {_gib(usable)} of the GPU's "
            f"{_gib(memory.total_bytes)}; set kv_cache_memory_bytes or max_total_tokens lower, or leave both out"
        )


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / _GIB:.1f} GiB"
