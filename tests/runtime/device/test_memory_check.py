"""Sizes that exceed the machine's memory are refused before anything is allocated."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixkv.checkpoints import Checkpoint, resolve
from radixkv.errors import CheckpointError, ConfigError
from radixkv.runtime.device import memory_check
from radixkv.runtime.device.cpu.executor import CpuExecutor
from radixkv.runtime.device.cpu.persistent_batch import PersistentBatch
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.memory.cpu.kv_pool import KVPool
from radixkv.runtime.device.memory.page_shape import PageLayout, PageShape, count_pages
from radixkv.runtime.device.memory_check import available_bytes, check_allocation
from radixkv.runtime.device.model_config.rope import Rope
from radixkv.runtime.device.ops.cpu.layers import Rotary
from support.checkpoints import save_llama
from support.device_support import limited_memory

Build = Callable[[], object]
TABLE_BYTES = 4 * 8 * 25
"""Size of a block table of 8 rows and 100 positions in pages of 4."""
POOL_BYTES = 2 * 4 * 3 * 11 * 2 * 4 * 16
ANGLES_BYTES = 16 * 100 * 16


def tables() -> PersistentBatch:
    return PersistentBatch(max_rows=8, max_model_len=100, page_size=4)


def pool() -> KVPool:
    return KVPool(PageLayout.uniform(PageShape(n_layers=3, n_kv_heads=2, page_size=4, head_dim=16)), 10)


def angles() -> Rotary:
    return Rotary(16, Rope(10_000.0), 100)


@pytest.mark.parametrize(
    ("build", "n_bytes", "message"),
    [
        (tables, TABLE_BYTES, "block table .*max_num_seqs 8 and max_model_len 100 "),
        (pool, POOL_BYTES, "KV pool .* kv_cache_memory_bytes or max_total_tokens "),
        (angles, ANGLES_BYTES, "rotary angles .*max_model_len 100 "),
    ],
)
def test_allocations_beyond_the_available_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch, build: Build, n_bytes: int, message: str
) -> None:
    monkeypatch.setattr(memory_check, "available_bytes", lambda: n_bytes)
    build()
    monkeypatch.setattr(memory_check, "available_bytes", lambda: n_bytes - 1)
    with pytest.raises(ConfigError, match=message) as caught:
        build()
    assert f"{n_bytes} bytes" in str(caught.value)
    assert f"{n_bytes - 1} bytes are available" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_total_tokens": 10**23 - 1}, "KV pool .* max_total_tokens"),
        ({"kv_cache_memory_bytes": 10**23 - 1, "max_total_tokens": None}, "KV pool .*kv_cache_memory_bytes"),
        ({"max_num_seqs": 10**9}, "max_num_seqs 1000000000 and max_model_len 200"),
        ({"max_num_seqs": 10**23}, "max_num_seqs 100000000000000000000000"),
    ],
)
def test_settings_of_absurd_size_are_refused(
    checkpoint: Callable[[str], Checkpoint], settings: dict[str, Any], message: str
) -> None:
    # With page_size 1 there are as many table entries as positions: a billion rows exceed any machine's memory.
    base: dict[str, Any] = {
        "page_size": 1,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 200,
        "max_model_len": 200,
        "max_total_tokens": 200,
    }
    with pytest.raises(ConfigError, match=message):
        CpuExecutor(checkpoint("grouped"), DeviceSettings(**({"kv_cache_memory_bytes": 1 << 30} | base | settings)))


def test_a_corrupt_context_length_is_refused_before_allocating(tmp_path: Path) -> None:
    save_llama(tmp_path, max_position_embeddings=10**18)
    with pytest.raises(ConfigError, match=f"rotary angles .*max_model_len {10**18} "):
        open_executor(tmp_path, max_model_len=10**18)


def test_a_corrupt_layer_count_is_refused_before_the_pool_is_sized(tmp_path: Path) -> None:
    save_llama(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 1000000000'))
    with limited_memory(), pytest.raises(CheckpointError, match="num_hidden_layers is 1000000000"):
        open_executor(tmp_path, max_model_len=200)


def open_executor(folder: Path, *, max_model_len: int) -> CpuExecutor:
    return CpuExecutor(
        resolve(str(folder)),
        DeviceSettings(
            page_size=4,
            max_num_seqs=4,
            max_model_len=max_model_len,
            kv_cache_memory_bytes=1 << 20,
            max_total_tokens=None,
            max_num_batched_tokens=2048,
        ),
    )


def test_a_pool_below_one_page_names_the_settings_to_change() -> None:
    def count(memory_bytes: int, max_total_tokens: int | None) -> int:
        page = PageShape(n_layers=3, n_kv_heads=2, page_size=16, head_dim=8)
        return count_pages(page, memory_bytes, max_total_tokens)

    with pytest.raises(ConfigError, match="max_total_tokens 8 .* 16.* page_size .*8"):
        count(1 << 30, 8)
    assert count(1 << 30, 16) == 1
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes 1 .* 6144.* page_size 16"):
        count(1, None)
    assert count(6144, None) == 1


@pytest.mark.parametrize("failure", [MemoryError("numpy's"), RuntimeError("torch's")])
def test_a_failed_allocation_is_a_config_error(failure: Exception) -> None:
    with (
        pytest.raises(ConfigError, match="^a table of 1 bytes .*set it lower$") as caught,
        check_allocation(1, "a table", "set it lower"),
    ):
        raise failure
    assert caught.value.__cause__ is failure


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_available_memory_is_the_kernels_estimate_within_the_containers_limit(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal:  9000 kB\nMemFree:  1 kB\nMemAvailable:    5000 kB\n")
    assert available_bytes(tmp_path) == 5_120_000
    write(tmp_path, "sys/fs/cgroup/memory.max", "max\n")
    assert available_bytes(tmp_path) == 5_120_000
    write(tmp_path, "sys/fs/cgroup/memory.max", "4096000\n")
    assert available_bytes(tmp_path) == 4_096_000
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "2048000\n")
    assert available_bytes(tmp_path) == 2_048_000


def test_available_memory_without_a_kernel_estimate(tmp_path: Path) -> None:
    assert available_bytes() <= available_bytes(tmp_path)
    assert available_bytes(tmp_path) > 1 << 20
