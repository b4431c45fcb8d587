"""Checks of machine, settings and checkpoint for CUDA, with synthetic facts."""

from __future__ import annotations

import logging
import os
import re
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from radixkv.checkpoints import resolve
from radixkv.errors import ConfigError
from radixkv.runtime.device.cuda.preflight import check_for_cuda
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.machine import (
    PACKAGES,
    PAGE_SIZES,
    Gpu,
    Machine,
    check_block_tables,
    check_gpus,
    check_kv_cache_dtype,
    check_machine,
    check_max_num_seqs,
    check_page_size,
    check_weights_fit,
    choose_attention_backend,
    choose_dtype,
    inspect_machine,
    local_cpus,
    version,
)
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.model_support import HEAD_SIZES, check_model
from radixkv.settings.config import AttentionBackend
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS
from support.paths import ROOT

GIB = 1 << 30
GPU = Gpu("NVIDIA H100", (9, 0), 80 * GIB, 70 * GIB)
MACHINE = Machine(
    torch="2.11.0+cu130",
    torch_cuda=(13, 0),
    driver_cuda=(13, 0),
    gpu=GPU,
    problem="",
    packages={"flashinfer-python": "0.7.2", "triton": "3.6.0"},
    has_flashinfer_kernels=False,
    nvcc=None,
    c_compiler="/usr/bin/gcc",
    has_python_headers=True,
    cxx_compiler="/usr/bin/c++",
)
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def parse(changes: dict[str, Any]) -> DecoderConfig:
    return DecoderConfig.parse(MODEL | changes, Path("/some/config.json"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"driver_cuda": (13, 2)},
        {"torch": "2.11.0+cu126", "torch_cuda": (12, 6)},
        {"torch": "2.11.0+cu129", "torch_cuda": (12, 9), "driver_cuda": (12, 4)},
        {"gpu": replace(GPU, capability=(8, 0))},
        {"gpu": replace(GPU, capability=(12, 0))},
        {"packages": {"flashinfer-python": "0.7.2.post1", "triton": "3.7.1"}},
        {"packages": {"flashinfer-python": None, "triton": "3.6.0"}},
        {"packages": {"flashinfer-python": "0.7.3", "triton": "3.6.0"}},
    ],
)
def test_suitable_machines(changes: dict[str, Any]) -> None:
    machine = replace(MACHINE, **changes)
    assert check_machine(machine) is machine.gpu


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch": "2.11.0+cpu", "torch_cuda": None}, "torch 2.11.0[+]cpu .*device to cpu"),
        ({"driver_cuda": None}, "NVIDIA driver .*device to cpu"),
        (
            {"driver_cuda": (12, 8)},
            "driver .*12.8.* torch 2.11.0[+]cu130 .*13.0.* CUDA 12",
        ),
        (
            {"gpu": None, "problem": "No CUDA GPUs are available"},
            "cannot be used: No CUDA GPUs are available; make",
        ),
        (
            {"gpu": Gpu("Tesla T4", (7, 5), GIB, GIB)},
            "Tesla T4 .*7.5.* 8.0 .*device to cpu",
        ),
        (
            {"packages": {"flashinfer-python": "0.7.2", "triton": None}},
            r"triton .*radixkv\[cuda\]",
        ),
        (
            {"packages": {"flashinfer-python": "0.7.2", "triton": "3.5.1"}},
            r"triton 3.5.1 .*3.6.* 3.8.*radixkv\[cuda\]",
        ),
        ({"packages": {"flashinfer-python": "0.7.2", "triton": "3.8.0"}}, "triton 3.8.0 .*3.8"),
        ({"c_compiler": None}, "C compiler.* gcc .*clang .*device to cpu"),
        ({"has_python_headers": False}, "Python's headers.*device to cpu"),
    ],
)
def test_unsuitable_machines_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_machine(replace(MACHINE, **changes))


def test_the_versions_are_those_of_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {
        f"{name}>={'.'.join(map(str, least))},<{'.'.join(map(str, below))}"
        for name, (least, below) in PACKAGES.items()
    }
    assert set(project["optional-dependencies"]["cuda"]) == ranges


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2.11.0+cu130", (2, 11, 0)),
        ("0.7.2.post1", (0, 7, 2)),
        ("3.7.0rc2", (3, 7, 0)),
        ("13.0", (13, 0)),
        ("x", ()),
    ],
)
def test_versions(text: str, numbers: tuple[int, ...]) -> None:
    assert version(text) == numbers


NVCC = "/usr/local/cuda/bin/nvcc"


def never() -> list[str]:
    raise AssertionError("FlashInfer is imported")


def chosen(changes: dict[str, Any], missing: Callable[[], list[str]], setting: AttentionBackend = "auto") -> str:
    return choose_attention_backend(setting, replace(MACHINE, **changes), missing)


def test_flashinfer_computes_prompts_where_its_kernels_are_built(caplog: pytest.LogCaptureFixture) -> None:
    for setting in ("auto", "flashinfer"):
        assert chosen({"has_flashinfer_kernels": True}, list, setting) == "flashinfer"
    assert caplog.messages == []


def test_flashinfer_computes_prompts_where_its_kernels_can_be_compiled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert chosen({"nvcc": NVCC}, lambda: ["batch_decode", "batch_prefill"]) == "flashinfer"
    (message,) = caplog.messages
    assert "compiles 2 of its kernels" in message


@pytest.mark.parametrize(
    ("changes", "missing", "reason"),
    [
        ({}, never, "FlashInfer's kernels .*nvcc.*flashinfer install-jit-cache-wheel"),
        (
            {"has_flashinfer_kernels": True},
            lambda: ["first", "other"],
            "2 of FlashInfer's .*first.*nvcc.*jit-cache",
        ),
        ({"nvcc": NVCC, "cxx_compiler": None}, never, "FlashInfer's kernels .*C[+][+] compiler.*CXX"),
        (
            {"packages": {**MACHINE.packages, "flashinfer-python": None}},
            never,
            "flashinfer-python is not installed",
        ),
        ({"packages": {**MACHINE.packages, "flashinfer-python": "0.6.18"}}, never, "0.6.18 .*0.7.2.* 0.7.3"),
    ],
)
def test_triton_computes_prompts_where_flashinfer_cannot_be_had(
    changes: dict[str, Any], missing: Callable[[], list[str]], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says why, and what to install. FlashInfer is not imported where nothing can be built."""
    assert chosen(changes, missing) == "triton"
    (line,) = caplog.messages
    assert re.search(f"prompts .*times as long.*{reason}.* for full speed", line)
    assert "\n" not in line
    with pytest.raises(
        ConfigError, match=f"attention_backend is flashinfer.*{reason}.*attention_backend to triton"
    ):
        chosen(changes, missing, "flashinfer")


def test_triton_is_taken_without_a_look_at_flashinfer(caplog: pytest.LogCaptureFixture) -> None:
    assert chosen({"nvcc": NVCC, "has_flashinfer_kernels": True}, never, "triton") == "triton"
    assert caplog.messages == []


def test_kernels_that_an_earlier_start_compiled_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In FlashInfer's folders; those of other releases and GPUs count, as FlashInfer is asked next."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    assert not inspect_machine().has_flashinfer_kernels
    kernel = tmp_path / ".cache/flashinfer/0.7.2/90a/cached_ops/some_kernel/some_kernel.so"
    kernel.parent.mkdir(parents=True)
    assert not inspect_machine().has_flashinfer_kernels
    kernel.touch()
    assert inspect_machine().has_flashinfer_kernels


def test_a_package_of_kernels_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    (tmp_path / "flashinfer_jit_cache.py").write_text("raise AssertionError")
    assert not inspect_machine().has_flashinfer_kernels
    monkeypatch.syspath_prepend(tmp_path)
    assert inspect_machine().has_flashinfer_kernels


def test_the_named_cxx_compiler_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/g++-99 -pipe")
    machine = replace(MACHINE, nvcc=NVCC, cxx_compiler=inspect_machine().cxx_compiler)
    assert check_machine(machine) is GPU
    with pytest.raises(ConfigError, match=r"/no/such/g[+][+]-99 .*CXX"):
        choose_attention_backend("flashinfer", machine, never)
    monkeypatch.setenv("CXX", f"{sys.executable} -pipe")
    machine = replace(machine, cxx_compiler=inspect_machine().cxx_compiler)
    assert choose_attention_backend("flashinfer", machine, lambda: ["batch_decode"]) == "flashinfer"


def test_the_cxx_compiler_is_the_one_that_flashinfer_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "g++").touch(mode=0o755)
    assert inspect_machine().cxx_compiler is None
    (tmp_path / "c++").touch(mode=0o755)
    assert inspect_machine().cxx_compiler == str(tmp_path / "c++")


@pytest.mark.parametrize("page_size", [2, 8, 128])
def test_page_sizes(page_size: int) -> None:
    for known in PAGE_SIZES:
        check_page_size(known)
    with pytest.raises(ConfigError, match=f"page_size {page_size} .*1, 16, 32 or 64"):
        check_page_size(page_size)


def test_models_that_only_the_cpu_runs() -> None:
    for head_dim in HEAD_SIZES:
        check_model(parse({"head_dim": head_dim}))
    for head_dim in (2, 32, 80, 1024):
        with pytest.raises(ConfigError, match=f"heads of size {head_dim}.* 64, 128, 256 and 512.*device to cpu"):
            check_model(parse({"head_dim": head_dim}))
    hybrid = {"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 4, "head_dim": 128}
    check_model(parse(hybrid))
    check_model(parse({**hybrid, "layer_types": ["full_attention"] * 4}))
    for size in (8, 96, 512):
        for name in ("linear_key_head_dim", "linear_value_head_dim"):
            with pytest.raises(ConfigError, match=f"delta nets with heads of size {size}; .*128 and 256; .*to cpu"):
                check_model(parse({**hybrid, name: size}))
    gemma4 = {"architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 6, "head_dim": 128}
    check_model(parse(gemma4))
    with pytest.raises(ConfigError, match="this Gemma4ForCausalLM has heads of size 384.*device to cpu"):
        check_model(parse({**gemma4, "global_head_dim": 384}))
    check_model(parse({"architectures": ["MixtralForCausalLM"], **EXPERTS}))
    check_model(parse({"architectures": ["GptOssForCausalLM"], **EXPERTS}))


@pytest.mark.parametrize(("head_dim", "most"), [(64, 64), (128, 64), (256, 32), (512, 32)])
def test_models_with_more_heads_per_kv_head_than_a_tile_holds(head_dim: int, most: int) -> None:
    def model(n_heads: int) -> DecoderConfig:
        return parse({"head_dim": head_dim, "num_attention_heads": n_heads, "num_key_value_heads": 1})

    check_model(model(most))
    with pytest.raises(ConfigError, match=f"{most + 1} heads .* {most} heads .*device to cpu"):
        check_model(model(most + 1))


@pytest.mark.parametrize(
    ("setting", "config", "dtype"),
    [
        ("auto", {"torch_dtype": "float16"}, torch.float16),
        ("auto", {"dtype": "float16"}, torch.float16),
        ("auto", {"torch_dtype": "bfloat16"}, torch.bfloat16),
        ("auto", {"torch_dtype": "float32"}, torch.bfloat16),
        ("auto", {"torch_dtype": ["odd"]}, torch.bfloat16),
        ("auto", {}, torch.bfloat16),
        ("float16", {"torch_dtype": "bfloat16"}, torch.float16),
        ("bfloat16", {"torch_dtype": "float16"}, torch.bfloat16),
        ("auto", {"torch_dtype": "float16", "architectures": ["Gemma3ForCausalLM"]}, torch.bfloat16),
    ],
)
def test_dtypes(setting: str, config: dict[str, Any], dtype: torch.dtype) -> None:
    assert choose_dtype(setting, config) is dtype


def test_a_model_whose_activations_overflow_float16() -> None:
    with pytest.raises(ConfigError, match="Gemma3ForCausalLM overflow float16; set dtype to bfloat16"):
        choose_dtype("float16", {"architectures": ["Gemma3ForCausalLM"]})


def test_a_dtype_that_only_the_cpu_computes_in() -> None:
    with pytest.raises(ConfigError, match="float32 .*CUDA; use bfloat16 or float16, or set device to cpu"):
        choose_dtype("float32", {"torch_dtype": "float32"})


def test_weights_larger_than_the_free_memory() -> None:
    check_weights_fit(70 * GIB, GPU)
    with pytest.raises(ConfigError, match=r"70.5 GiB.* NVIDIA H100 .*70.0 GiB"):
        check_weights_fit(70 * GIB + GIB // 2, GPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu_names": ["H100"]}, "tensor_parallel_size 2 needs as many GPUs, and torch sees 1"),
        ({"gpu_names": ["H100", "H200", "H100"]}, "needs equal GPUs, and the first 2 are H100, H200"),
        ({"gpu_index": 1}, "takes GPUs from the first on, and this process's current one is 1"),
        ({"strangers": [(0, 1)]}, "access each other's memory, and 0 and 1 do not; choose others"),
        ({"symmetric_memory": "NVSHMEM"}, "TORCH_SYMMMEM NVSHMEM; unset it"),
    ],
)
def test_gpus_that_cannot_share_a_model_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_gpus(replace(MACHINE, **{"gpu_names": ["H100", "H100"]} | changes), 2)


def test_gpus_that_can_share_a_model() -> None:
    machine = replace(MACHINE, gpu_names=["H100", "H100", "H200"], strangers=[(0, 2), (1, 2)])
    check_gpus(machine, 2)
    check_gpus(replace(machine, symmetric_memory="CUDA"), 2)


def test_replicas_need_gpus_of_their_own() -> None:
    check_gpus(replace(MACHINE, gpu_names=["H100"] * 4), 2, 2)
    check_gpus(replace(MACHINE, gpu_names=["H100"] * 2), 1, 2)
    with pytest.raises(ConfigError, match="data_parallel_size 2 times tensor_parallel_size 2 needs .* sees 3"):
        check_gpus(replace(MACHINE, gpu_names=["H100"] * 3), 2, 2)
    with pytest.raises(ConfigError, match=r"data_parallel_size 2 needs equal GPUs, .* H100, H200"):
        check_gpus(replace(MACHINE, gpu_names=["H100", "H200"]), 1, 2)


def test_this_machine_without_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("No CUDA GPUs are available.\nAnd more")

    before = set(sys.modules)
    monkeypatch.setattr(torch.cuda, "init", init)
    machine = inspect_machine()
    assert (machine.gpu, machine.problem) == (None, "No CUDA GPUs are available")
    assert machine.torch == torch.__version__
    assert not {"triton", "flashinfer"} & (set(sys.modules) - before)
    with pytest.raises(ConfigError):
        check_machine(machine)


def test_memory_cached_by_torch_is_freed_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = [60 * GIB]
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", cached.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 * GIB - sum(cached), 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=1: f"{GPU.name} {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: GPU.capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: (device, peer) != (1, 0))
    monkeypatch.setenv("TORCH_SYMMMEM", "NVSHMEM")
    machine = inspect_machine()
    assert machine.gpu == replace(GPU, name=f"{GPU.name} 1")
    assert (machine.gpu_names, machine.gpu_index) == ([f"{GPU.name} 0", f"{GPU.name} 1"], 1)
    assert (machine.strangers, machine.symmetric_memory) == ([(0, 1)], "NVSHMEM")


def test_rows_that_attention_cannot_be_launched_for() -> None:
    check_max_num_seqs(32_768)
    with pytest.raises(ConfigError, match="max_num_seqs 32769 .*32768"):
        check_max_num_seqs(32_769)


def test_block_tables_that_int32_cannot_index() -> None:
    check_block_tables(512, 131_072, 1)
    check_block_tables(16_382, 131_072, 1)
    check_block_tables(16_384, 131_072, 16)
    with pytest.raises(ConfigError, match="max_num_seqs 16383 .*max_model_len 131072 "):
        check_block_tables(16_383, 131_072, 1)


def test_block_tables_whose_tokens_uint32_cannot_index() -> None:
    check_block_tables(1022, 1 << 22, 16)
    with pytest.raises(ConfigError, match="max_num_seqs 1023 .*max_model_len 4194304 .*4294967295"):
        check_block_tables(1023, 1 << 22, 16)


def test_python_headers_are_found_where_triton_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's Python would otherwise point to /usr/local/include, for headers of packages."""
    (tmp_path / "Python.h").touch()
    folders = {"posix_prefix": tmp_path, "posix_local": tmp_path / "local"}
    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: "posix_local")
    monkeypatch.setattr(sysconfig, "get_path", lambda _, scheme="posix_local": str(folders[scheme]))
    assert inspect_machine().has_python_headers


def test_cpus_near_a_gpu(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    device = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    for text, expected in (
        ("0-4095\n", allowed),
        (f"{min(allowed)},5000-5003\n", {min(allowed)}),
        ("5000-5003\n", None),
        ("\n", None),
    ):
        (device / "local_cpulist").write_text(text)
        assert local_cpus("0000:1b:00.0", tmp_path) == expected
    assert local_cpus("0000:1c:00.0", tmp_path) is None
    assert local_cpus("", tmp_path) is None


def test_an_fp8_kv_cache_needs_ada() -> None:
    ampere = Gpu("NVIDIA A100", (8, 0), 80 * GIB, 70 * GIB)
    check_kv_cache_dtype("auto", ampere)
    for capability in ((8, 9), (9, 0), (12, 0)):
        check_kv_cache_dtype("fp8", replace(GPU, capability=capability))
    with pytest.raises(ConfigError, match=r"^kv_cache_dtype fp8 needs .* 8\.9 .* NVIDIA A100 has 8\.0; set it"):
        check_kv_cache_dtype("fp8", ampere)


def test_experts_in_fp8_need_ada(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **CHECKPOINTS["mixtral"] | {"head_dim": 64})
    ampere = Gpu("NVIDIA A100", (8, 0), 80 * GIB, 70 * GIB)

    def check(gpu: Gpu, quantization: str | None) -> None:
        check_for_cuda(
            resolve(str(tmp_path)),
            gpu,
            DeviceSettings(
                max_num_batched_tokens=2048,
                page_size=16,
                max_num_seqs=8,
                max_model_len=64,
                dtype="bfloat16",
                quantization=quantization,
                kv_cache_dtype="auto",
                kv_cache_memory_bytes=None,
                max_total_tokens=None,
                gpu_memory_utilization=0.9,
            ),
        )

    with pytest.raises(ConfigError, match=r"^experts in FP8 need .* 8\.9 .* NVIDIA A100 has 8\.0; use"):
        check(ampere, "fp8")
    check(ampere, None)
    check(GPU, "fp8")


def test_adapters_must_fit_beside_the_weights(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **CHECKPOINTS["grouped"] | {"head_dim": 64})
    settings = DeviceSettings(
        page_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        max_model_len=64,
        dtype="bfloat16",
        has_adapters=True,
        max_loras=8,
    )
    check_for_cuda(resolve(str(tmp_path)), GPU, settings)
    many = msgspec.structs.replace(settings, max_loras=10**6)
    with pytest.raises(ConfigError, match=r"^1000000 adapters of rank 16 \(max_loras .* set one"):
        check_for_cuda(resolve(str(tmp_path)), GPU, many)
