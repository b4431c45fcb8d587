"""Choice of the device and preflight checks; with ``auto`` the log says why a GPU is not used."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from radixkv.checkpoints import Checkpoint
from radixkv.errors import ConfigError
from radixkv.runtime import assemble, open_loop
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.device import factory
from radixkv.runtime.device.cpu.executor import CpuExecutor
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.factory import choose_device, resolve_config
from radixkv.runtime.device.machine import PACKAGES, Gpu, Machine
from radixkv.runtime.device.ranks.open import open_ranks
from radixkv.runtime.device.resolved_config import ResolvedConfig, with_defaults
from radixkv.runtime.device.start_times import StartTimes
from radixkv.runtime.drafts.text_drafts import TextDrafts
from radixkv.runtime.open_loop import build_loop
from radixkv.runtime.scheduler.scheduler import Scheduler, SchedulerLimits
from radixkv.runtime.step.executor import Executor
from radixkv.settings.config import (
    AdapterConfig,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    TenantConfig,
)
from radixkv.settings.speculative import SpeculativeConfig
from radixkv.wire.adapter_messages import LoadAdapter
from radixkv.wire.messages import Failed

Get = Callable[[str], Checkpoint]


@pytest.fixture
def small(checkpoint: Get) -> Checkpoint:
    """A checkpoint with heads of size 16, which the CUDA kernels do not support."""
    return checkpoint("grouped")


@pytest.fixture
def hybrid(small: Checkpoint) -> Checkpoint:
    """A checkpoint of which three layers are gated delta nets."""
    changes = {"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 4, "head_dim": 128}
    return replace(small, config={**small.config, **changes})


@pytest.fixture
def supported(small: Checkpoint) -> Checkpoint:
    """A checkpoint with heads of size 128, which the CUDA kernels support."""
    return replace(small, config={**small.config, "head_dim": 128})


OLD_DRIVER = Machine(
    torch="2.11.0+cu130",
    torch_cuda=(13, 0),
    driver_cuda=(12, 4),
    gpu=None,
    problem="The NVIDIA driver on your system is too old",
    packages={},
    has_flashinfer_kernels=False,
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


def with_capability(*capability: int) -> Machine:
    return replace(H100, gpu=Gpu("some GPU", capability, 80 << 30, 70 << 30))


def test_an_explicit_device_is_kept(small: Checkpoint, supported: Checkpoint) -> None:
    assert choose_device("cpu", supported, None) == "cpu"
    assert choose_device("cuda", small, H100) == "cuda"


def test_auto_chooses_a_gpu_that_can_run_the_model(
    supported: Checkpoint, small: Checkpoint, hybrid: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    without_driver = replace(OLD_DRIVER, driver_cuda=None)
    assert choose_device("auto", supported, without_driver) == "cpu"
    for capability in ((8, 0), (9, 0), (12, 1)):
        assert choose_device("auto", supported, with_capability(*capability)) == "cuda"
    assert caplog.messages == []
    assert choose_device("auto", small, with_capability(12, 1)) == "cpu"
    (warning,) = caplog.messages
    assert "CPU" in warning
    assert "heads of size 16 " in warning
    caplog.clear()
    assert choose_device("auto", hybrid, with_capability(12, 1)) == "cuda"
    assert caplog.messages == []
    odd = replace(hybrid, config={**hybrid.config, "linear_value_head_dim": 96})
    assert choose_device("auto", odd, with_capability(12, 1)) == "cpu"
    assert "gated delta nets of size 96 are not supported" in caplog.text
    caplog.clear()
    gemma = replace(supported, config={**supported.config, "architectures": ["Gemma4ForCausalLM"]})
    assert choose_device("auto", gemma, with_capability(12, 1)) == "cuda"
    assert caplog.messages == []
    odd = replace(gemma, config={**gemma.config, "global_head_dim": 384})
    assert choose_device("auto", odd, with_capability(12, 1)) == "cpu"
    assert "heads of size 384 " in caplog.text


@pytest.mark.parametrize(
    ("machine", "reasons"),
    [(with_capability(7, 5), ("7.5", "8.0")), (OLD_DRIVER, ("driver", "12.4"))],
    ids=["GPU", "driver"],
)
def test_auto_warns_of_what_cannot_be_used(
    supported: Checkpoint, caplog: pytest.LogCaptureFixture, machine: Machine, reasons: tuple[str, str]
) -> None:
    assert choose_device("auto", supported, machine) == "cpu"
    (warning,) = caplog.messages
    assert all(part in warning for part in ("CPU", *reasons))


def test_the_cpu_executor_is_opened_with_its_defaults(small: Checkpoint) -> None:
    config = EngineConfig(cache=CacheConfig(max_total_tokens=160))
    opened = open_ranks(with_defaults(config, "cpu", 64), small)
    assert isinstance(opened, CpuExecutor)
    assert (opened.n_pages, opened.pool.k.dtype) == (10, torch.float32)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(ModelConfig(device="cpu", dtype="float16")), "dtype 'float16' .*CPU"),
        (EngineConfig(ModelConfig(device="cpu", attention_backend="triton")), "attention_backend triton .*CPU"),
        (EngineConfig(ModelConfig(device="cpu", max_model_len=1025)), "max_model_len 1025 .* checkpoint's 1024"),
    ],
)
def test_settings_not_supported_on_the_cpu(small: Checkpoint, config: EngineConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_loop(config, small)


@pytest.mark.parametrize(
    ("size", "bound"),
    [
        ({"max_total_tokens": 160}, "max_total_tokens, 160,"),
        ({"kv_cache_memory_bytes": 1 << 20}, "bytes, 1048576,"),
    ],
)
def test_gpu_memory_utilization_on_the_cpu_gives_one_warning(
    small: Checkpoint, caplog: pytest.LogCaptureFixture, size: dict[str, int], bound: str
) -> None:
    config = EngineConfig(ModelConfig(device="cpu"), CacheConfig(gpu_memory_utilization=0.5, **size))
    build_loop(config, small).close()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "gpu_memory_utilization 0.5 " in warning
    assert bound in warning


def test_the_loop_reports_max_num_seqs(small: Checkpoint) -> None:
    config = EngineConfig(ModelConfig(device="cpu"), CacheConfig(max_total_tokens=160))
    assert build_loop(config, small).ready.max_num_seqs == 256


def test_each_setting_of_the_scheduler_reaches_it(small: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    settings_used: dict[str, Any] = {}

    def open_scheduler(cache: PageCache, limits: SchedulerLimits, **settings: Any) -> Scheduler:
        settings_used.update(settings | asdict(limits))
        return assemble.open_scheduler(cache, limits, **settings)

    monkeypatch.setattr(open_loop, "open_scheduler", open_scheduler)
    settings = SchedulerConfig(
        3,
        99,
        "fcfs",
        max_queued_requests=5,
        lpm_window=6,
        lpm_max_passes=7,
        queue_timeout_s=8,
        num_reserved_decode_tokens=9,
        max_reserved_decode_share=0.5,
        speculative_config=SpeculativeConfig(num_speculative_tokens=3),
    )
    build_loop(EngineConfig(ModelConfig(device="cpu"), CacheConfig(max_total_tokens=160), settings), small).close()
    limits = asdict(settings)
    del limits["speculative_config"]
    assert settings_used.items() >= limits.items()
    assert isinstance(settings_used["drafts"], TextDrafts)


@pytest.fixture
def use_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine, Callable[..., object]], None]:
    """Returns a function that replaces the machine and the function that opens its GPU."""

    def replace_machine(machine: Machine, open_cuda_executor: Callable[..., object]) -> None:
        monkeypatch.setattr(factory, "inspect_machine", lambda: machine)
        module = SimpleNamespace(open_cuda_executor=open_cuda_executor)
        monkeypatch.setitem(sys.modules, "radixkv.runtime.device.cuda.factory", module)

    return replace_machine


ReplaceMachine = Callable[[Machine, Callable[..., object]], None]


def test_an_unusable_machine_is_refused_before_the_gpu_is_opened(
    use_machine: ReplaceMachine, supported: Checkpoint
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the GPU was opened")

    use_machine(OLD_DRIVER, never)
    with pytest.raises(ConfigError, match="driver"):
        build_loop(EngineConfig(ModelConfig(device="cuda")), supported)


def test_the_machine_is_looked_at_once(
    supported: Checkpoint, monkeypatch: pytest.MonkeyPatch, use_machine: ReplaceMachine
) -> None:
    looks: list[None] = []

    def opened(_: Checkpoint, machine: Machine, *__: object) -> None:
        assert machine is H100
        raise KeyboardInterrupt

    def look() -> Machine:
        looks.append(None)
        return H100

    use_machine(H100, opened)
    monkeypatch.setattr(factory, "inspect_machine", look)
    for device in ("auto", "cuda"):
        looks.clear()
        with pytest.raises(KeyboardInterrupt):
            build_loop(EngineConfig(ModelConfig(device=device)), supported)
        assert len(looks) == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore about it"),
            r"too little memory.* 20.00 GiB.* gpu_memory_utilization",
        ),
        (
            torch.AcceleratorError("CUDA error: out of memory\nMore about it"),
            "memory.* gpu_memory_utilization",
        ),
    ],
    ids=["of the GPU", "of the host"],
)
def test_too_little_memory_at_start_is_a_one_line_error(
    use_machine: ReplaceMachine,
    supported: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    message: str,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    use_machine(H100, full)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(ConfigError, match=message) as raised:
        open_ranks(with_defaults(EngineConfig(), "cuda", 64, H100), supported)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("enforce_eager", value) for value in (True, False)),
        *(("attention_backend", value) for value in ("auto", "triton", "flashinfer")),
    ],
)
def test_settings_reach_the_cuda_executor(
    use_machine: ReplaceMachine, supported: Checkpoint, setting: str, value: object
) -> None:
    settings_used: list[DeviceSettings] = []
    use_machine(H100, lambda *arguments: settings_used.append(arguments[2]))
    config = EngineConfig(ModelConfig(**{setting: value}))  # type: ignore[arg-type]
    open_ranks(with_defaults(config, "cuda", 64, H100), supported)
    assert getattr(settings_used[-1], setting) == value


def test_flashinfer_that_is_not_installed_is_refused_before_the_gpu_is_opened(supported: Checkpoint) -> None:
    machine = replace(H100, packages={**H100.packages, "flashinfer-python": None})
    for backend in ("auto", "triton"):
        resolve_config(EngineConfig(ModelConfig(device="cuda", attention_backend=backend)), supported, machine)
    flashinfer = EngineConfig(ModelConfig(device="cuda", attention_backend="flashinfer"))
    resolve_config(flashinfer, supported, H100)
    with pytest.raises(ConfigError, match=r"flashinfer-python is not installed.*radixkv\[cuda\]"):
        resolve_config(flashinfer, supported, machine)


def test_flashinfer_is_refused_for_heads_that_it_has_no_kernels_for(supported: Checkpoint) -> None:
    gemma = replace(supported, config={**supported.config, "architectures": ["Gemma4ForCausalLM"]})
    wide = replace(supported, config={**supported.config, "head_dim": 512})
    equal = replace(gemma, config={**gemma.config, "global_head_dim": 128})
    flashinfer = EngineConfig(ModelConfig(device="cuda", attention_backend="flashinfer"))
    resolve_config(flashinfer, equal, H100)
    for model, reason in (
        (gemma, "the layers of this Gemma4ForCausalLM have heads of several shapes"),
        (wide, "this LlamaForCausalLM has heads of size 512, and FlashInfer's have up to 256"),
    ):
        with pytest.raises(ConfigError, match=f"flashinfer, but {reason}; set attention_backend to triton"):
            resolve_config(flashinfer, model, H100)
        for backend in ("auto", "triton"):
            resolve_config(EngineConfig(ModelConfig(device="cuda", attention_backend=backend)), model, H100)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (EngineConfig(cache=CacheConfig(page_size=8)), {}, "page_size 8 "),
        (EngineConfig(ModelConfig(max_model_len=2000)), {}, "max_model_len 2000 "),
        (EngineConfig(scheduler=SchedulerConfig(max_num_seqs=32_769)), {}, "max_num_seqs 32769 .*32768"),
        (EngineConfig(), {"head_dim": 24}, "heads of size 24"),
        (EngineConfig(), {"vocab_size": 1 << 40}, "weights "),
        (EngineConfig(cache=CacheConfig(gpu_memory_utilization=0.1)), {}, "gpu_memory_utilization 0.1 "),
        (
            EngineConfig(cache=CacheConfig(kv_cache_memory_bytes=1 << 40)),
            {},
            "KV pool of 1024.0 GiB ",
        ),
    ],
)
def test_settings_that_do_not_fit_a_gpu_are_refused_without_weights(
    use_machine: ReplaceMachine,
    supported: Checkpoint,
    tmp_path: Path,
    config: EngineConfig,
    changes: dict[str, Any],
    message: str,
) -> None:
    use_machine(H100, lambda *_, **__: None)
    without_weights = replace(supported, folder=tmp_path)
    on_cuda = replace(config, model=replace(config.model, device="cuda"))
    with pytest.raises(ConfigError, match=message):
        resolve_config(on_cuda, replace(without_weights, config={**supported.config, **changes}), H100)
    plain = EngineConfig(ModelConfig(device="cuda"))
    limit = without_weights.max_position_embeddings
    assert resolve_config(plain, without_weights, H100) == with_defaults(plain, "cuda", limit, H100)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()])
def test_a_failed_start_frees_what_it_loaded(
    use_machine: ReplaceMachine, supported: Checkpoint, error: BaseException
) -> None:
    loaded: list[weakref.ref[torch.Tensor]] = []

    def fail(*_: object, **__: object) -> None:
        weights = torch.zeros(8)
        loaded.append(weakref.ref(weights))
        raise error

    use_machine(H100, fail)
    with pytest.raises((ConfigError, KeyboardInterrupt)) as raised:
        open_ranks(with_defaults(EngineConfig(), "cuda", 64, H100), supported)
    assert raised.value is not None, "the error is still referenced here"
    assert loaded[0]() is None


def test_states_count_on_a_gpu_and_have_defaults_of_their_own(hybrid: Checkpoint, supported: Checkpoint) -> None:
    """Their memory is checked before weights are read; what they do not go with is refused as on the CPU."""
    plain = EngineConfig(ModelConfig(device="cuda"))
    settings = resolve_config(plain, hybrid, H100).device_settings
    assert (settings.max_num_seqs, settings.max_num_batched_tokens) == (256, 8192)
    assert 13 << 30 < settings.state_memory_bytes < 14 << 30  # a fifth of 70 GiB
    tight = replace(H100, gpu=Gpu("some GPU", (9, 0), 2 << 30, 2 << 30))
    settings = resolve_config(
        EngineConfig(ModelConfig(device="cuda", max_model_len=64)), hybrid, tight
    ).device_settings
    assert 360 << 20 < settings.state_memory_bytes < 369 << 20
    resolve_config(replace(plain, cache=CacheConfig(host_memory_bytes=1 << 20)), hybrid, H100)
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"cache": CacheConfig(state_memory_bytes=100)},
            "state_memory_bytes is 100; the states of one sequence take",
        ),
        ({"cache": CacheConfig(state_memory_bytes=1 << 40)}, "states of its layers for .* take 102[0-9]"),
        ({"scheduler": SchedulerConfig(max_num_seqs=32_000)}, "max_num_seqs 32000 .*set max_num_seqs or state_mem"),
        ({"cache": CacheConfig(state_memory_bytes=67 << 30)}, "leaves no room for a KV pool"),
        ({"scheduler": SchedulerConfig(speculative_config=SpeculativeConfig())}, "leave speculative_config out"),
    ]
    for changes, message in cases:
        with pytest.raises(ConfigError, match=message):
            resolve_config(replace(plain, **changes), hybrid, H100)
    with pytest.raises(ConfigError, match="no recurrent layers"):
        resolve_config(replace(plain, cache=CacheConfig(state_memory_bytes=1 << 30)), supported, H100)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_layers_with_windows_have_pages_of_their_own_on_both_devices(
    small: Checkpoint, device: Literal["cpu", "cuda"], caplog: pytest.LogCaptureFixture
) -> None:
    """Unless something needs pages of all layers, which the log names."""
    kinds = {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 2, "head_dim": 128, "sliding_window": 16}
    mixed = replace(small, config={**small.config, **kinds, "layer_types": ["sliding_attention", "full_attention"]})
    plain = EngineConfig(ModelConfig(device=device, max_model_len=64))
    assert resolve_config(plain, mixed, H100).device_settings.has_window_pages
    assert not caplog.records
    host = replace(plain, cache=CacheConfig(host_memory_bytes=1 << 24))
    assert resolve_config(host, mixed, H100).device_settings.has_window_pages
    shared = replace(plain, cache=CacheConfig(host_memory_bytes=1 << 24, cache_url="s3://bucket/kv"))
    assert resolve_config(shared, mixed, H100).device_settings.has_window_pages
    assert resolve_config(
        replace(plain, tenants=(TenantConfig("a"),)), mixed, H100
    ).device_settings.has_window_pages
    on_ranks = replace(plain, model=ModelConfig(device=device, max_model_len=64, tensor_parallel_size=2))
    two = replace(H100, gpu_names=("H100", "H100"))
    assert resolve_config(on_ranks, mixed, two).device_settings.has_window_pages
    within = replace(plain, model=ModelConfig(device=device, max_model_len=16))
    assert not resolve_config(within, mixed, H100).device_settings.has_window_pages
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tenants": (TenantConfig("a", max_page_share=0.5), TenantConfig("b"))}, "tenants have shares of pages"),
    ]
    with caplog.at_level(logging.INFO):
        for changes, what in cases:
            caplog.clear()
            settings = resolve_config(replace(plain, **changes), mixed, H100).device_settings
            assert not settings.has_window_pages
            assert f"all pages of layers with windows are kept: {what}" in caplog.text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_layers_of_several_shapes_have_window_pages_where_each_kind_has_one_shape(
    small: Checkpoint, device: Literal["cpu", "cuda"], caplog: pytest.LogCaptureFixture
) -> None:
    kinds = {
        "architectures": ["Gemma4ForCausalLM"],
        "num_hidden_layers": 6,
        "head_dim": 128,
        "global_head_dim": 256,
        "sliding_window": 16,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
    }
    mixed = replace(small, config={**small.config, **kinds})
    plain = EngineConfig(ModelConfig(device=device, max_model_len=64))
    with caplog.at_level(logging.INFO):
        assert resolve_config(plain, mixed, H100).device_settings.has_window_pages
        assert not caplog.records
        full = {layer: {"head_dim": 256} for layer in ("1", "3", "5")}
        for layer in (None, "0", "1"):
            by_layer = full if layer is None else {**full, layer: {"head_dim": 64}}
            other = {**mixed.config, "num_kv_shared_layers": 0, "per_layer_config": by_layer}
            settings = resolve_config(plain, replace(mixed, config=other), H100).device_settings
            assert settings.has_window_pages == (layer is None)
            is_named = "K and V have several shapes in layers with windows, or in the others" in caplog.text
            assert is_named == (layer is not None)
            caplog.clear()


@pytest.mark.parametrize(
    ("adapters", "on_cpu", "on_cuda"),
    [
        (AdapterConfig(enable_lora=True), (None, None), (8, 64)),
        (AdapterConfig(enable_lora=True, max_loras=3), (3, None), (3, 64)),
        (AdapterConfig(enable_lora=True, max_loras=70), (70, None), (70, 70)),
        (AdapterConfig(enable_lora=True, max_cpu_loras=9), (None, 9), (8, 9)),
        (AdapterConfig(enable_lora=True, max_cpu_loras=5), (None, 5), (5, 5)),
    ],
)
def test_a_gpu_bounds_the_adapters_of_a_step_and_those_that_are_loaded(
    supported: Checkpoint,
    adapters: AdapterConfig,
    on_cpu: tuple[int | None, int | None],
    on_cuda: tuple[int, int],
) -> None:
    for device, expected in (("cpu", on_cpu), ("cuda", on_cuda)):
        config = EngineConfig(ModelConfig(device=device), adapters=adapters)
        resolved = resolve_config(config, supported, H100)
        assert (resolved.device_settings.max_loras, resolved.max_adapters) == expected


def test_one_adapter_too_many_is_refused_on_a_gpu_without_max_cpu_loras(small: Checkpoint) -> None:
    """The loop is opened over the CPU's executor, with the settings of a GPU."""
    config = EngineConfig(ModelConfig(device="cpu"), adapters=AdapterConfig(enable_lora=True))
    resolved = replace(resolve_config(config, small, None), device="cuda")

    def open_device(resolved: ResolvedConfig, checkpoint: Checkpoint, times: StartTimes) -> Executor:
        return CpuExecutor(checkpoint, resolved.device_settings)

    loop = open_loop.open_loop(resolved, small, open_device=open_device)
    for number in range(64):
        assert loop.receive(LoadAdapter(str(number), str(number), "/nowhere")) == []
    (refused,) = loop.receive(LoadAdapter("64", "64", "/nowhere"))
    assert isinstance(refused, Failed)
    assert "one more than max_cpu_loras 64, the default on this device; unload one of" in refused.text
    loop.close()
