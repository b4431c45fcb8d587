"""``auto`` is the GPU where there is one that runs the model; the log says why not, if not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from radixkv.checkpoints import Checkpoint
from radixkv.config import CacheConfig, EngineConfig, ModelConfig, with_defaults
from radixkv.errors import ConfigError
from radixkv.runtime.device.cpu import CpuExecutor
from radixkv.runtime.device.executor import choose_device, open_executor
from radixkv.runtime.loop import build_loop

Get = Callable[[str], Checkpoint]


@pytest.fixture
def small(checkpoint: Get) -> Checkpoint:
    """With heads of size 16."""
    return checkpoint("grouped")


@pytest.fixture
def usual(small: Checkpoint) -> Checkpoint:
    """With heads of size 128."""
    return replace(small, config={**small.config, "head_dim": 128})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int] | None], None]:
    """Makes torch see a GPU of a compute capability, or none."""

    def see(capability: tuple[int, int] | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    return see


See = Callable[[tuple[int, int] | None], None]


def test_what_is_set_is_what_computes(gpu: See, small: Checkpoint, usual: Checkpoint) -> None:
    gpu((9, 0))
    assert choose_device("cpu", usual) == "cpu"
    gpu(None)
    assert choose_device("cuda", small) == "cuda"


def test_auto_takes_a_gpu_that_runs_the_model(
    gpu: See, usual: Checkpoint, small: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    gpu(None)
    assert choose_device("auto", usual) == "cpu"
    for capability in ((8, 0), (9, 0), (12, 1)):
        gpu(capability)
        assert choose_device("auto", usual) == "cuda"
    assert caplog.messages == []
    assert choose_device("auto", small) == "cpu"
    assert caplog.messages == ["computing on the CPU, not on the GPU: heads of size 16 are not built for CUDA"]


def test_auto_says_why_it_leaves_an_old_gpu(gpu: See, usual: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    gpu((7, 5))
    assert choose_device("auto", usual) == "cpu"
    assert caplog.messages == ["computing on the CPU: the GPU's compute capability is 7.5; CUDA needs 8.0"]


def test_the_cpu_is_opened_with_its_defaults(small: Checkpoint) -> None:
    config = with_defaults(EngineConfig(cache=CacheConfig(max_total_tokens=160)), "cpu")
    executor = open_executor(config, small, 64)
    assert isinstance(executor, CpuExecutor)
    assert (executor.n_pages, executor.pool.k.dtype) == (10, torch.float32)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(ModelConfig(device="cpu", dtype="float16")), "dtype 'float16' is not supported on the CPU"),
        (
            EngineConfig(ModelConfig(device="cpu"), CacheConfig(gpu_memory_utilization=0.5)),
            "gpu_memory_utilization",
        ),
    ],
)
def test_what_the_cpu_does_not_have_is_refused(small: Checkpoint, config: EngineConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_loop(config, small)


def test_a_frontend_learns_how_many_rows_there_are(small: Checkpoint) -> None:
    config = EngineConfig(ModelConfig(device="cpu"), CacheConfig(max_total_tokens=160))
    assert build_loop(config, small).ready.max_num_seqs == 256
