"""Defaults that depend on the device and the checkpoint."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from radixkv.errors import ConfigError
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.resolved_config import with_defaults
from radixkv.settings.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig

LIMIT = 4096
"""The checkpoint's limit of ``max_model_len``."""


def test_defaults_depend_on_the_device() -> None:
    cpu, cuda = (with_defaults(EngineConfig(seed=7), device, LIMIT) for device in ("cpu", "cuda"))
    assert (cpu.device, cuda.device) == ("cpu", "cuda")
    assert cpu.config.seed == cuda.config.seed == 7
    on_cpu, on_cuda = cpu.device_settings, cuda.device_settings
    assert (on_cpu.max_num_seqs, on_cpu.max_num_batched_tokens) == (256, 2048)
    assert (on_cuda.max_num_seqs, on_cuda.max_num_batched_tokens) == (512, 8192)
    assert (on_cpu.kv_cache_memory_bytes, on_cuda.kv_cache_memory_bytes) == (1 << 30, None)
    assert on_cuda.gpu_memory_utilization == 0.9
    assert on_cpu.max_model_len == on_cuda.max_model_len == LIMIT


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_settings_that_are_set_stay_on_every_device(device: Any) -> None:
    config = EngineConfig(
        ModelConfig("some/model", dtype="bfloat16", device=device, max_model_len=100, enforce_eager=True),
        CacheConfig(8, kv_cache_memory_bytes=5000, gpu_memory_utilization=0.5 if device == "cuda" else None),
        SchedulerConfig(
            3,
            99,
            "fcfs",
            max_queued_requests=5,
            lpm_window=6,
            lpm_max_passes=7,
            queue_timeout_s=1.0,
            num_reserved_decode_tokens=8,
            max_reserved_decode_share=0.9,
        ),
    )
    resolved = with_defaults(config, device, LIMIT)
    settings = resolved.device_settings
    assert (settings.dtype, settings.max_model_len, settings.enforce_eager) == ("bfloat16", 100, True)
    assert (settings.page_size, settings.kv_cache_memory_bytes) == (8, 5000)
    assert device == "cpu" or settings.gpu_memory_utilization == 0.5
    assert (settings.max_num_seqs, settings.max_num_batched_tokens) == (3, 99)
    assert resolved.config is config


def test_the_settings_of_a_device_survive_a_wire() -> None:
    settings = with_defaults(EngineConfig(ModelConfig(quantization="fp8")), "cuda", LIMIT).device_settings
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(settings), type=DeviceSettings) == settings


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("page_size", [1, 16, 4096])
@pytest.mark.parametrize("n_tokens", [None, 4096, 5000, 20_000])
@pytest.mark.parametrize("n_rows", [None, 1, 500, 900])
def test_a_default_fits_the_settings_that_are_set(
    device: Any, page_size: int, n_tokens: int | None, n_rows: int | None
) -> None:
    """A step can hold a token of each row but one, and one page; no default is smaller than necessary."""
    try:
        config = EngineConfig(
            cache=CacheConfig(page_size),
            scheduler=SchedulerConfig(max_num_seqs=n_rows, max_num_batched_tokens=n_tokens),
        )
    except ConfigError:
        assert n_tokens is not None
        assert n_rows is not None
        assert n_tokens < n_rows - 1 + page_size
        return
    resolved = with_defaults(config, device, LIMIT)
    found_rows, found_tokens = (
        resolved.device_settings.max_num_seqs,
        resolved.device_settings.max_num_batched_tokens,
    )
    spare = found_tokens - (found_rows - 1 + page_size)
    assert spare >= 0
    assert found_rows == n_rows or found_rows in (256, 512) or spare == 0
    assert found_tokens == n_tokens or found_tokens in (2048, 8192) or spare == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("n_bytes", [5000, 1 << 30])
def test_the_pool_size_can_be_set_only_once(device: Any, n_bytes: int) -> None:
    twice = EngineConfig(cache=CacheConfig(kv_cache_memory_bytes=n_bytes, max_total_tokens=640))
    with pytest.raises(ConfigError, match=f"kv_cache_memory_bytes {n_bytes} .*max_total_tokens 640"):
        with_defaults(twice, device, LIMIT)
    resolved = with_defaults(EngineConfig(cache=CacheConfig(max_total_tokens=640)), device, LIMIT)
    assert resolved.device_settings.max_total_tokens == 640


def test_gpu_memory_utilization_changes_nothing_on_the_cpu() -> None:
    config = EngineConfig(cache=CacheConfig(gpu_memory_utilization=0.8))
    assert with_defaults(config, "cpu", LIMIT).device_settings.kv_cache_memory_bytes == 1 << 30
