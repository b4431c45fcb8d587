"""``auto`` is the GPU where there is one that runs the model; the log says why not, if not."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radixkv.checkpoints import Checkpoint
from radixkv.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, with_defaults
from radixkv.errors import ConfigError
from radixkv.runtime.device import factory
from radixkv.runtime.device.executor_cpu import CpuExecutor
from radixkv.runtime.device.factory import choose_device, open_executor, resolve_config
from radixkv.runtime.device.machine_cuda import PACKAGES, Gpu, Machine
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
    opened = open_executor(config, small, 64)
    assert isinstance(opened, CpuExecutor)
    assert (opened.n_pages, opened.pool.k.dtype) == (10, torch.float32)


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


OLD_DRIVER = Machine(
    torch="2.11.0+cu130",
    torch_cuda=(13, 0),
    driver_cuda=(12, 4),
    gpu=None,
    problem="The NVIDIA driver on your system is too old",
    packages={},
    nvcc=None,
    cxx_compiler=None,
    c_compiler=None,
    has_python_headers=False,
)


H100 = replace(
    OLD_DRIVER,
    driver_cuda=(13, 0),
    gpu=Gpu("NVIDIA H100", (9, 0), 80 << 30, 70 << 30),
    packages={name: ".".join(map(str, least)) for name, (least, _) in PACKAGES.items()},
    c_compiler="/usr/bin/gcc",
    has_python_headers=True,
)


def test_auto_says_why_a_driver_is_of_no_use(
    gpu: See, usual: Checkpoint, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(None)
    monkeypatch.setattr(factory, "look", lambda: OLD_DRIVER)
    assert choose_device("auto", usual) == "cpu"
    (line,) = caplog.messages
    assert line.startswith("computing on the CPU: the NVIDIA driver runs CUDA up to 12.4, and torch")


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine, Callable[..., object]], None]:
    """Puts a machine, and what opens its GPU, in place of this one's."""

    def put(machine: Machine, open_it: Callable[..., object]) -> None:
        monkeypatch.setattr(factory, "look", lambda: machine)
        module = SimpleNamespace(open_cuda_executor=open_it)
        monkeypatch.setitem(sys.modules, "radixkv.runtime.device.factory_cuda", module)

    return put


Put = Callable[[Machine, Callable[..., object]], None]


def test_what_the_machine_lacks_is_said_before_the_gpu_is_opened(opening: Put, usual: Checkpoint) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the GPU was opened")

    opening(OLD_DRIVER, never)
    with pytest.raises(ConfigError, match="update the driver"):
        open_executor(with_defaults(EngineConfig(), "cuda"), usual, 64)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore about it"),
            r"too little memory: .* 20.00 GiB; set gpu_memory_utilization, max",
        ),
        (torch.AcceleratorError("CUDA error: out of memory\nMore about it"), "out of memory; set gpu_memory_"),
    ],
    ids=["of the GPU", "of the host"],
)
def test_too_little_memory_at_the_start_is_one_line(
    opening: Put, usual: Checkpoint, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    opening(H100, full)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(ConfigError, match=message) as raised:
        open_executor(with_defaults(EngineConfig(), "cuda"), usual, 64)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("is_eager", [True, False])
def test_the_gpu_is_opened_without_graphs_if_that_is_asked_for(
    opening: Put, usual: Checkpoint, is_eager: bool
) -> None:
    asked: dict[str, Any] = {}
    opening(H100, lambda *_, **settings: asked.update(settings))
    open_executor(with_defaults(EngineConfig(ModelConfig(enforce_eager=is_eager)), "cuda"), usual, 64)
    assert asked["enforce_eager"] is is_eager


MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (EngineConfig(cache=CacheConfig(page_size=8)), {}, "page_size 8 is not supported on CUDA"),
        (EngineConfig(ModelConfig(max_model_len=2000)), {}, "max_model_len 2000 must be between"),
        (EngineConfig(scheduler=SchedulerConfig(max_num_seqs=32_769)), {}, "max_num_seqs 32769 .* at most 32768"),
        (EngineConfig(), {"head_dim": 24}, "heads of size 24"),
        (EngineConfig(), {"vocab_size": 1 << 40}, "weights take .* a smaller model"),
        (EngineConfig(), MIXTRAL, "experts"),
        (EngineConfig(cache=CacheConfig(gpu_memory_utilization=0.1)), {}, "no room for a KV pool"),
        (
            EngineConfig(cache=CacheConfig(kv_cache_memory_bytes=1 << 40)),
            {},
            "KV pool of 1024.0 GiB does not fit",
        ),
    ],
)
def test_what_does_not_fit_a_gpu_is_known_without_weights(
    opening: Put, usual: Checkpoint, tmp_path: Path, config: EngineConfig, changes: dict[str, Any], message: str
) -> None:
    opening(H100, lambda *_, **__: None)
    bare = replace(usual, folder=tmp_path)
    on_cuda = replace(config, model=replace(config.model, device="cuda"))
    with pytest.raises(ConfigError, match=message):
        resolve_config(on_cuda, replace(bare, config={**usual.config, **changes}))
    assert resolve_config(EngineConfig(ModelConfig(device="cuda")), bare) == with_defaults(EngineConfig(), "cuda")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()])
def test_a_start_that_fails_keeps_nothing_of_what_it_loaded(
    opening: Put, usual: Checkpoint, error: BaseException
) -> None:
    loaded: list[weakref.ref[torch.Tensor]] = []

    def fail(*_: object, **__: object) -> None:
        weights = torch.zeros(8)
        loaded.append(weakref.ref(weights))
        raise error

    opening(H100, fail)
    with pytest.raises((ConfigError, KeyboardInterrupt)) as raised:
        open_executor(with_defaults(EngineConfig(), "cuda"), usual, 64)
    assert raised.value is not None, "whoever keeps the error"
    assert loaded[0]() is None
