"""What an engine had on the GPU is free after its end, for this process and for others, without anybody's help."""

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
"""More than what cuBLAS keeps on the stream that an engine had, as long as the process lives."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("small"))


@pytest.fixture
def no_help() -> Iterator[None]:
    """Nothing but the engine gives memory back: what tests before this one left is gone, and no collector runs."""
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
    """Of the GPU's memory, as the driver says it to every process."""
    torch.cuda.synchronize()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes


def live_and_die(folder: Path) -> int:
    """Bytes that were in use while an engine lived."""
    llm = open_engine(folder)
    llm.generate([random_ids(300, 0), random_ids(20, 1)], greedy(8), use_tqdm=False)
    n_bytes = used_bytes()
    llm.shutdown()
    llm.shutdown()
    return n_bytes


def test_engines_one_after_another_leave_nothing(folder: Path, no_help: None) -> None:
    live_and_die(folder)  # the first brings the kernels, which stay
    before = used_bytes()
    for i in range(1, 4):
        assert live_and_die(folder) - before > POOL_BYTES
        assert used_bytes() - before < i * KEPT_BYTES


def test_an_engine_that_ends_in_the_middle_of_an_answer_leaves_nothing(folder: Path, no_help: None) -> None:
    live_and_die(folder)
    before = used_bytes()
    llm = open_engine(folder)
    stream = llm.stream({"prompt_token_ids": random_ids(300, 0)}, greedy(64))
    next(stream)
    llm.shutdown()
    assert used_bytes() - before < KEPT_BYTES
    stream.close()


def test_a_start_that_fails_at_its_end_leaves_nothing(
    folder: Path, no_help: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    live_and_die(folder)
    before = used_bytes()
    seen: list[int] = []

    def fail(**_: object) -> None:
        seen.append(used_bytes())
        raise RuntimeError("the last thing that is made")

    monkeypatch.setattr("radixkv.runtime.device.factory_cuda.Packer", fail)
    with pytest.raises(RuntimeError, match="the last thing") as raised:
        open_engine(folder)
    assert seen[0] - before > POOL_BYTES
    assert raised.value is not None, "whoever keeps the error"
    assert used_bytes() - before < KEPT_BYTES
