"""The pool's size is arithmetic over what was measured."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from radixkv.errors import ConfigError
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.memory.cuda.pool_size import RESERVE_BYTES, MemoryUse, plan_pages
from radixkv.runtime.device.memory.page_shape import PageShape

GIB = 1 << 30
PAGE = PageShape(n_layers=32, n_kv_heads=8, page_size=16, head_dim=128, dtype=torch.bfloat16)
PAGE_BYTES = 2 << 20
MEMORY = MemoryUse(total_bytes=80 * GIB, free_bytes=60 * GIB)


def plan(memory: MemoryUse = MEMORY, **changes: Any) -> int:
    settings = DeviceSettings(page_size=16, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=8192)
    return plan_pages(PAGE, memory, msgspec.structs.replace(settings, **changes))


def test_a_page_of_this_model() -> None:
    assert PAGE.n_bytes == PAGE_BYTES


def test_the_share_includes_used_memory_and_the_zero_page() -> None:
    assert (plan() + 1) * PAGE_BYTES == (72 - 20) * GIB
    assert (plan(gpu_memory_utilization=0.5) + 1) * PAGE_BYTES == (40 - 20) * GIB
    assert (plan(MemoryUse(80 * GIB, 60 * GIB, later_bytes=GIB)) + 1) * PAGE_BYTES == (72 - 21) * GIB


def test_a_part_of_a_page_does_not_count() -> None:
    for extra, n in ((0, 0), (PAGE_BYTES - 1, 0), (PAGE_BYTES, 1)):
        assert plan(MemoryUse(80 * GIB, 60 * GIB + extra)) == plan() + n


def test_a_reserve_stays_free() -> None:
    assert (plan(gpu_memory_utilization=1.0) + 1) * PAGE_BYTES == 60 * GIB - RESERVE_BYTES
    assert plan(gpu_memory_utilization=0.999) == plan(gpu_memory_utilization=1.0)


def test_a_given_pool_size_is_exact() -> None:
    assert plan(kv_cache_memory_bytes=GIB) == 512
    assert plan(max_total_tokens=1000, max_model_len=8192) == 62
    assert plan(max_total_tokens=8200) == 512
    assert plan(max_total_tokens=16_384, kv_cache_memory_bytes=GIB, gpu_memory_utilization=0.1) == 1024


def test_a_given_pool_may_take_the_last_free_page() -> None:
    max_pages = (60 * GIB - RESERVE_BYTES) // PAGE_BYTES - 1
    assert plan(max_total_tokens=max_pages * 16) == plan(kv_cache_memory_bytes=max_pages * PAGE_BYTES) == max_pages
    for settings in (
        {"max_total_tokens": max_pages * 16 + 16},
        {"kv_cache_memory_bytes": (max_pages + 1) * PAGE_BYTES},
    ):
        with pytest.raises(ConfigError, match="KV pool of 59.5 GiB .* 59.5 GiB .*80.0 GiB.* kv_"):
            plan(**settings)


@pytest.mark.parametrize("free", [8 * GIB + PAGE_BYTES, 8 * GIB, 0])
def test_a_share_that_leaves_nothing(free: int) -> None:
    used = f"{80 - free / GIB:.1f}"
    with pytest.raises(ConfigError, match=f"gpu_memory_utilization 0.9 .* {used} GiB"):
        plan(MemoryUse(80 * GIB, free))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"kv_cache_memory_bytes": 63 * PAGE_BYTES}, "kv_cache_memory_bytes"),
        ({"gpu_memory_utilization": 0.25 + 63.5 * PAGE_BYTES / (80 * GIB)}, "gpu_memory_utilization"),
    ],
)
def test_a_pool_that_holds_no_whole_request(settings: dict[str, Any], name: str) -> None:
    n_tokens = plan(**settings, max_model_len=992) * 16
    assert n_tokens in (992, 1008)
    assert plan(**settings, max_model_len=n_tokens) * 16 == n_tokens
    with pytest.raises(
        ConfigError,
        match=f"{n_tokens} tokens, fewer than max_model_len {n_tokens + 1}; .*most {n_tokens}, or {name} high",
    ):
        plan(**settings, max_model_len=n_tokens + 1)
