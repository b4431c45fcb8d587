"""GPU memory of an engine is freed at its shutdown, without the cyclic collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_support import DEVICE, greedy, random_ids, save

from radixkv import LLM

MIB = 1 << 20
POOL_BYTES = 2048 * MIB
KEPT_BYTES = 128 * MIB
"""More than the cuBLAS workspace, which stays on an engine's stream until the process ends."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("small"))


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Frees memory of earlier tests, then turns the cyclic collector off, so that only the engine frees memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    gc.disable()
    yield
    gc.enable()


def open_engine(folder: Path) -> LLM:
    return LLM(
        folder,
        device=DEVICE,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=64,
        kv_cache_memory_bytes=POOL_BYTES,
    )


def used_bytes() -> int:
    """Returns the GPU's used bytes, as the driver reports them to every process."""
    torch.cuda.synchronize()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes


def run_engine(folder: Path) -> int:
    """Runs an engine and shuts it down; returns the bytes in use while it ran."""
    llm = open_engine(folder)
    llm.generate([random_ids(300, 0), random_ids(20, 1)], greedy(8), use_tqdm=False)
    n_bytes = used_bytes()
    llm.shutdown()
    llm.shutdown()
    return n_bytes


def test_engines_one_after_another_leave_nothing(folder: Path, no_collector: None) -> None:
    run_engine(folder)  # the first engine loads kernels, which stay
    before = used_bytes()
    for i in range(1, 4):
        assert run_engine(folder) - before > POOL_BYTES
        assert used_bytes() - before < i * KEPT_BYTES


def test_an_engine_that_ends_in_the_middle_of_an_answer_leaves_nothing(folder: Path, no_collector: None) -> None:
    run_engine(folder)
    before = used_bytes()
    llm = open_engine(folder)
    stream = llm.stream({"prompt_token_ids": random_ids(300, 0)}, greedy(64))
    next(stream)
    llm.shutdown()
    assert used_bytes() - before < KEPT_BYTES
    stream.close()


def test_a_start_that_fails_at_its_end_leaves_nothing(
    folder: Path, no_collector: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_engine(folder)
    before = used_bytes()
    seen: list[int] = []

    def fail(*_: object, **__: object) -> None:
        seen.append(used_bytes())
        raise RuntimeError("the last object of the start")

    monkeypatch.setattr("radixkv.runtime.device.cuda.factory.Packer", fail)
    with pytest.raises(RuntimeError, match="the last object") as raised:
        open_engine(folder)
    assert seen[0] - before > POOL_BYTES
    assert raised.value is not None, "the error is kept"
    assert used_bytes() - before < KEPT_BYTES
