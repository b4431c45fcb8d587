"""Sizes that the machine's memory does not allow are refused before any of it is touched."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixkv.checkpoints import Checkpoint, resolve
from radixkv.errors import CheckpointError, ConfigError
from radixkv.runtime.device import host_memory as memory
from radixkv.runtime.device.executor_cpu import CpuExecutor
from radixkv.runtime.device.host_memory import available_bytes, claim
from radixkv.runtime.device.kv_pool_cpu import KVPool, PageShape, count_pages
from radixkv.runtime.device.ops.cpu.layers import Rotary
from radixkv.runtime.device.pack_cpu import Batcher
from radixkv.runtime.device.spec.rope import Rope
from support.checkpoints import save_llama
from support.device_support import limited_memory

Build = Callable[[], object]
ENTRIES_BYTES = 4 * 8 * 25
"""A block table of 8 rows and 100 positions in pages of 4."""
POOL_BYTES = 2 * 4 * 3 * 11 * 2 * 4 * 16
ANGLES_BYTES = 16 * 100 * 16


def tables() -> Batcher:
    return Batcher(page_size=4, max_rows=8, max_model_len=100, n_pages=10)


def pool() -> KVPool:
    return KVPool(PageShape(n_layers=3, n_kv_heads=2, page_size=4, head_dim=16), 10)


def angles() -> Rotary:
    return Rotary(16, Rope(10_000.0), 100)


@pytest.mark.parametrize(
    ("build", "n_bytes", "message"),
    [
        (tables, ENTRIES_BYTES, "block table for max_num_seqs 8 and max_model_len 100 of .* set one of them lower"),
        (pool, POOL_BYTES, "KV pool of .* set kv_cache_memory_bytes or max_total_tokens lower"),
        (angles, ANGLES_BYTES, "rotary angles for max_model_len 100 of .* set max_model_len lower"),
    ],
)
def test_what_the_machine_cannot_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, build: Build, n_bytes: int, message: str
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: n_bytes)
    build()
    monkeypatch.setattr(memory, "available_bytes", lambda: n_bytes - 1)
    with pytest.raises(ConfigError, match=message) as caught:
        build()
    assert f"of {n_bytes} bytes does not fit into memory ({n_bytes - 1} bytes are available)" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_total_tokens": 10**23 - 1}, "a KV pool of .* max_total_tokens lower"),
        ({"kv_cache_memory_bytes": 10**23 - 1, "max_total_tokens": None}, "set kv_cache_memory_bytes"),
        ({"max_rows": 10**9}, "max_num_seqs 1000000000 and max_model_len 200"),
        ({"max_rows": 10**23}, "max_num_seqs 100000000000000000000000"),
    ],
)
def test_settings_of_any_size(
    checkpoint: Callable[[str], Checkpoint], settings: dict[str, Any], message: str
) -> None:
    # page_size 1: as many table entries as positions, so that no machine of today holds a billion rows of them.
    base: dict[str, Any] = {"page_size": 1, "max_rows": 4, "max_model_len": 200, "max_total_tokens": 200}
    with pytest.raises(ConfigError, match=message):
        CpuExecutor(checkpoint("grouped"), **({"kv_cache_memory_bytes": 1 << 30} | base | settings))


def test_a_corrupt_context_length_is_no_allocation(tmp_path: Path) -> None:
    save_llama(tmp_path, max_position_embeddings=10**18)
    with pytest.raises(ConfigError, match=f"rotary angles for max_model_len {10**18} "):
        execute(tmp_path, max_model_len=10**18)


def test_a_corrupt_layer_count_is_not_taken_for_a_small_pool(tmp_path: Path) -> None:
    save_llama(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 1000000000'))
    with limited_memory(), pytest.raises(CheckpointError, match="num_hidden_layers is 1000000000"):
        execute(tmp_path, max_model_len=200)


def execute(folder: Path, *, max_model_len: int) -> CpuExecutor:
    return CpuExecutor(
        resolve(str(folder)),
        page_size=4,
        max_rows=4,
        max_model_len=max_model_len,
        kv_cache_memory_bytes=1 << 20,
        max_total_tokens=None,
    )


def test_less_than_a_page_says_what_to_set() -> None:
    def count(memory_bytes: int, max_total_tokens: int | None) -> int:
        page = PageShape(n_layers=3, n_kv_heads=2, page_size=16, head_dim=8)
        return count_pages(page, memory_bytes, max_total_tokens)

    with pytest.raises(ConfigError, match="max_total_tokens 8 .* at least 16, or page_size to at most 8"):
        count(1 << 30, 8)
    assert count(1 << 30, 16) == 1
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes 1 .* at least 6144, or page_size 16 lower"):
        count(1, None)
    assert count(6144, None) == 1


@pytest.mark.parametrize("failure", [MemoryError("numpy's"), RuntimeError("torch's")])
def test_a_failed_allocation_is_a_setting_that_does_not_fit(failure: Exception) -> None:
    with (
        pytest.raises(ConfigError, match="^a thing of 1 bytes does not fit .* set it lower$") as caught,
        claim(1, "a thing", "set it lower"),
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


def test_available_memory_where_the_kernel_does_not_say(tmp_path: Path) -> None:
    assert available_bytes() <= available_bytes(tmp_path)
    assert available_bytes(tmp_path) > 1 << 20
