"""How many pages the GPU has room for, once the weights are there and a step has shown what it takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixkv.errors import ConfigError
from radixkv.runtime.device.kv_pool_cpu import PageShape, count_pages

RESERVE_BYTES = 512 << 20
"""Never given to the pool: what libraries take at their first call, and what the allocator cannot use."""
_GIB = 1 << 30


@dataclass(frozen=True)
class Room:
    """The GPU's memory when the pool is to be made: weights and buffers are there."""

    total_bytes: int
    free_bytes: int
    """Beside them and what other processes have."""
    later_bytes: int = 0
    """What is still to be taken beside the pool: by the largest step, and by CUDA graphs."""


def measure(device: torch.device, later_bytes: int = 0) -> Room:
    """The room of this moment; what torch's allocator holds ready counts as used. Waits for the device."""
    torch.cuda.synchronize(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return Room(total_bytes, free_bytes, later_bytes)


def plan_pages(
    page: PageShape,
    room: Room,
    *,
    kv_cache_memory_bytes: int | None,
    max_total_tokens: int | None,
    gpu_memory_utilization: float,
    max_model_len: int,
) -> int:
    """Pages of the pool, beside which it has one that is not handed out.

    ``max_total_tokens`` decides, else ``kv_cache_memory_bytes``, else all that ``gpu_memory_utilization`` of the
    GPU's memory leaves beside what is used already, by other processes too.

    Raises:
        ConfigError: there is no room for it; or it cannot hold one request of ``max_model_len``, unless it
            was given in tokens: then larger requests are refused one by one, as on the CPU.
    """
    if max_total_tokens is not None or kv_cache_memory_bytes is not None:
        n_pages = count_pages(page, kv_cache_memory_bytes or 0, max_total_tokens)
        _require(n_pages, page, room)
        remedy = "kv_cache_memory_bytes"
    else:
        n_pages = _usable_bytes(room, gpu_memory_utilization) // page.n_bytes - 1
        if n_pages < 1:
            raise ConfigError(
                f"gpu_memory_utilization {gpu_memory_utilization:g} leaves no room for a KV pool: of the GPU's "
                f"{_gib(room.total_bytes)}, weights, workspace and other processes take "
                f"{_gib(room.total_bytes - room.free_bytes + room.later_bytes)}; set it higher, set "
                "max_num_batched_tokens or max_num_seqs lower, or take a smaller model"
            )
        remedy = "gpu_memory_utilization"
    if max_total_tokens is None and n_pages * page.page_size < max_model_len:
        raise ConfigError(
            f"the KV pool holds {n_pages * page.page_size} tokens, fewer than max_model_len {max_model_len}; set "
            f"max_model_len to at most {n_pages * page.page_size}, or {remedy} higher"
        )
    return n_pages


def _usable_bytes(room: Room, share: float) -> int:
    """For the pool, below 0 if there is none."""
    ceiling = min(int(room.total_bytes * share), room.total_bytes - RESERVE_BYTES)
    return ceiling - (room.total_bytes - room.free_bytes) - room.later_bytes


def _require(n_pages: int, page: PageShape, room: Room) -> None:
    n_bytes = (n_pages + 1) * page.n_bytes
    usable = max(0, _usable_bytes(room, 1.0))
    if n_bytes > usable:
        raise ConfigError(
            f"a KV pool of {_gib(n_bytes)} does not fit: weights and workspace leave {_gib(usable)} of the GPU's "
            f"{_gib(room.total_bytes)}; set kv_cache_memory_bytes or max_total_tokens lower, or leave both out"
        )


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / _GIB:.1f} GiB"
