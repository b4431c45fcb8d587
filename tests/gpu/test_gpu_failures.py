"""Out-of-memory steps, lost GPUs, refused starts, and engines that run one after another."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from gpu_support import DEVICE, greedy, opened, random_ids, save

from radixkv import LLM
from radixkv.errors import ConfigError, DeviceError, DeviceFailure
from radixkv.runtime.device.cuda.errors import CudaErrorConverter
from radixkv.runtime.device.machine import inspect_machine

MIB = 1 << 20
WIDE = 32_768
"""Size of the MLP, so that computing a prompt of 2,000 tokens takes some 400 MB."""

LOST = """
import sys, torch
from radixkv import LLM, SamplingParams
from radixkv.errors import DeviceLost
llm = LLM(sys.argv[1], device="cuda", dtype="bfloat16", max_model_len=256, max_total_tokens=4096, max_num_seqs=8)
stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True, logprobs=2))
try:
    for n_tokens, _ in enumerate(stream):
        if n_tokens == 20:  # the next steps are under way
            torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]
except DeviceLost as error:
    print("LOST", repr(str(error)), flush=True)
try:
    llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=4))
except DeviceLost as error:
    print("LOST", repr(str(error)), flush=True)
llm.shutdown()
print("DOWN", flush=True)
"""

LOST_UNSEEN = """
import sys, torch
from radixkv import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cuda", dtype="bfloat16", max_model_len=256, max_total_tokens=4096, max_num_seqs=8)
stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True, logprobs=2))
next(stream)
stream.close()  # the next steps are under way
torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]
try:
    torch.cuda.synchronize()
except torch.AcceleratorError:
    llm.shutdown()
    print("DOWN", flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("wide"), intermediate_size=WIDE)


@contextmanager
def memory_limited_to(n_bytes: int) -> Iterator[None]:
    """Limits torch to ``n_bytes`` beyond what is in use."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + n_bytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_requests_of_an_out_of_memory_step_are_retried_alone_until_one_fails(folder: Path) -> None:
    prompts = [random_ids(2000, seed) for seed in range(4)]
    with opened(folder, max_num_batched_tokens=8192) as llm:
        expected = [llm.generate([prompt], greedy(8))[0].outputs[0].token_ids for prompt in prompts]
        llm.flush_cache()
        n_steps = llm.get_metrics().steps_total
        with memory_limited_to(700 * MIB):
            retried = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy(8))]
        assert llm.get_metrics().steps_total > n_steps + 8
        assert sum(one[0] == other[0] for one, other in zip(retried, expected, strict=True)) >= 3
        llm.flush_cache()
        in_use = torch.cuda.memory_allocated()
        with memory_limited_to(50 * MIB), pytest.raises(DeviceFailure, match="again when it ran alone"):
            llm.generate(prompts[:1], greedy(8))
        assert torch.cuda.memory_allocated() <= in_use + MIB
        (canary,) = llm.generate(prompts[:1], greedy(8))
        assert canary.outputs[0].token_ids == expected[0]
        llm.flush_cache()
        metrics = llm.get_metrics()
        assert metrics.n_pages_free == metrics.n_pages


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that opens the GPU, changed to fail when weights are read."""
    from radixkv.runtime.device.cuda import factory as factory_cuda

    def never(*_: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(factory_cuda, "Decoder", never)
    return factory_cuda


@pytest.mark.parametrize(
    "settings",
    [{"kv_cache_memory_bytes": 1 << 40}, {"max_total_tokens": (1 << 31) - 1}, {"gpu_memory_utilization": 0.001}],
)
def test_a_pool_that_cannot_fit_is_refused_before_weights_are_read(
    folder: Path, settings: dict[str, Any], factory: ModuleType
) -> None:
    with pytest.raises(ConfigError, match="KV pool"):
        LLM(folder, device=DEVICE, max_model_len=256, **settings)


def test_kernels_that_cannot_be_compiled_are_named_before_weights_are_read(
    folder: Path, factory: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(inspect_machine(), nvcc=None, has_flashinfer_kernels=True)
    monkeypatch.setattr("radixkv.runtime.device.factory.inspect_machine", lambda: machine)
    monkeypatch.setattr(factory, "not_compiled", lambda *_: ["some_kernel"])
    with pytest.raises(ConfigError, match="some_kernel, and .* nvcc was not found"):
        LLM(folder, device=DEVICE, attention_backend="flashinfer", max_model_len=256, max_total_tokens=4096)


def test_too_little_pinned_memory_fails_only_the_step() -> None:
    with pytest.raises(DeviceError, match="step 3: there is too little memory"), CudaErrorConverter().convert(3):
        torch.empty(1 << 46, dtype=torch.uint8, pin_memory=True)
    assert torch.ones(4, device=DEVICE).sum().item() == 4


def test_a_lost_gpu_is_reported_by_every_call_and_the_process_exits_normally(tmp_path: Path) -> None:
    folder = save(tmp_path / "small")
    done = subprocess.run([sys.executable, "-c", LOST, folder], capture_output=True, text=True, check=False)
    *lost, last = done.stdout.splitlines()
    assert (done.returncode, len(lost), last) == (0, 2, "DOWN"), done.stderr[-2000:]
    assert all("the GPU failed and must be reopened" in line and "\\n" not in line for line in lost)


def test_a_gpu_lost_before_the_shutdown_does_not_abort_the_process(tmp_path: Path) -> None:
    folder = save(tmp_path / "small")
    done = subprocess.run([sys.executable, "-c", LOST_UNSEEN, folder], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "DOWN\n"), done.stderr[-2000:]


def test_consecutive_engines_get_the_same_memory_without_the_cyclic_collector(folder: Path) -> None:
    def one() -> tuple[int, int]:
        """Returns the pages of an engine, and the bytes in use after its shutdown."""
        llm = LLM(folder, device=DEVICE, dtype="bfloat16", max_model_len=4096, max_num_seqs=64)
        llm.generate([random_ids(300, 0), random_ids(20, 1)], greedy(8), use_tqdm=False)
        n_pages = llm.get_metrics().n_pages
        llm.shutdown()
        return n_pages, torch.cuda.memory_allocated()

    gc.collect()
    torch.cuda.empty_cache()
    gc.disable()
    try:
        first, second = one(), one()
    finally:
        gc.enable()
        torch.cuda.empty_cache()
    # A stream keeps its cuBLAS workspace.
    assert abs(second[1] - first[1]) < 64 * MIB
    assert abs(second[0] - first[0]) < 0.01 * first[0]
