"""Adapters on two GPUs: answers are those of merged models and of one GPU, and loads reach both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cpu_oracle import check_same_bits
from gpu_support import NEAR_TIE, SHAPE, check_same_answers, greedy, opened, random_ids, save, two_gpus
from test_gpu_lora import (
    KINDS,
    LAW,
    SQL,
    alone_of,
    answers_of,
    check_against_merged,
    folder,
    one_by_one,
    with_adapters,
    write_adapters,
)
from test_gpu_models import ARCHITECTURES

from radixkv import LLM, LoRARequest, RequestOutput
from radixkv.checkpoints import resolve
from radixkv.errors import InvalidRequest
from support.device_support import load_oracle
from support.lora import linear_modules, save_adapter
from support.quantized_checkpoints import save_quantized

__all__ = ["folder", "one_by_one"]

pytestmark = two_gpus
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "attention_backend": "triton"}


@pytest.mark.parametrize("name", [*KINDS, "qwen3"])
def test_scores_are_those_of_merged_models(name: str, tmp_path: Path) -> None:
    """Of ragged chunked prompts and of answers, of the model and two adapters in the same steps, with graphs."""
    check_against_merged(save(tmp_path / "base", **ARCHITECTURES[name]), tmp_path, **TWO)


def test_scores_without_graphs(tmp_path: Path) -> None:
    check_against_merged(save(tmp_path / "base"), tmp_path, enforce_eager=True, **TWO)


@pytest.mark.parametrize("format_name", ["fp8 channels", "fp8 blocks 128", "awq 32"])
def test_scores_beside_quantized_weights(format_name: str, tmp_path: Path) -> None:
    """Norms write FP8 with the sum, and in steps with adapters the 16 bits that these read, too."""
    save_quantized(tmp_path, format_name, **{**SHAPE, "initializer_range": 0.02})
    noise = {} if format_name.startswith("awq") else {"noise": 40.0}
    check_against_merged(tmp_path / "quantized", tmp_path, oracle=tmp_path / "dense", **noise, **TWO)


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 200}])
def test_a_batch_of_the_model_and_adapters(
    settings: dict[str, Any], sensitive_folder: Path, folder: Path, one_by_one: LLM
) -> None:
    """Beside the same requests one by one on one GPU; the second time warm."""
    prompts = [random_ids(10 + 7 * index, seed=index % 20) for index in range(48)]
    requests = [(None, SQL, LAW)[index % 3] for index in range(48)]
    expected = alone_of(one_by_one, prompts, requests)
    with opened(**with_adapters(sensitive_folder, folder, **(TWO | settings))) as llm:
        for _ in range(2):
            check_same_answers(expected, answers_of(llm, prompts, requests), tolerance=NEAR_TIE)
        assert llm.get_metrics().prefix_hits_total > 0


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_steps_without_adapters_keep_their_bits(
    quantization: str | None, sensitive_folder: Path, folder: Path
) -> None:
    prompts = [random_ids(n, seed=n) for n in (1, 33, 400, 900)]
    found: list[list[RequestOutput]] = []
    plain = {**TWO, "quantization": quantization}
    for settings in ({"model": sensitive_folder, **plain}, with_adapters(sensitive_folder, folder, **plain)):
        with opened(**settings) as llm:
            if "lora_modules" in settings:
                answers_of(llm, prompts, [SQL] * 4)
            params = greedy(24, logprobs=20)
            found.append([llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts])
    check_same_bits(*found)


def test_activated_adapters_share_the_pages_of_the_model(sensitive_folder: Path, tmp_path: Path) -> None:
    """Answers are those of the CPU; prompts before the invocation are hits."""
    oracle = load_oracle(resolve(str(sensitive_folder)))
    changes: dict[str, Any] = {"rank": 7, "lora_alpha": 4, "alora_invocation_tokens": [7, 8]}
    adapter = save_adapter(tmp_path / "sql", oracle, linear_modules(oracle), seed=2, **changes)
    prompts = [[*random_ids(90 + 13 * index, seed=index), 7, 8, *random_ids(5, seed=99)] for index in range(12)]
    modules = {"lora_modules": {"sql": adapter}}
    with opened(sensitive_folder, device="cpu", dtype="float32", **modules) as llm:
        expected = alone_of(llm, prompts, [SQL] * 12)
    with opened(sensitive_folder, max_num_batched_tokens=200, **TWO, **modules) as llm:
        llm.generate([prompt[:-7] for prompt in prompts], greedy(1), use_tqdm=False)  # by the model alone
        for _ in range(2):
            outputs = llm.generate(prompts, greedy(16), use_tqdm=False, lora_request=[SQL] * 12)
            check_same_answers(expected, [output.outputs[0].token_ids for output in outputs], tolerance=NEAR_TIE)
            assert all(output.num_cached_tokens >= len(output.prompt_token_ids) - 7 - 16 for output in outputs)


def test_adapters_come_and_go_in_few_slots_of_both_gpus(
    sensitive_folder: Path, folder: Path, one_by_one: LLM
) -> None:
    """Each name takes the slot that another has left on each GPU, and graphs go on; both take turns."""
    prompts = [random_ids(50, seed) for seed in range(6)]
    expected = {request: alone_of(one_by_one, prompts, [request] * 6) for request in (SQL, LAW)}
    with opened(sensitive_folder, enable_lora=True, max_loras=1, max_cpu_loras=2, **TWO) as llm:
        for index in range(12):
            request = (SQL, LAW)[index % 2]
            llm.load_lora_adapter("one", folder / request.lora_name, load_inplace=index > 0)
            llm.flush_cache()
            found = answers_of(llm, prompts, [LoRARequest("one")] * 6)
            check_same_answers(expected[request], found, tolerance=NEAR_TIE)
        llm.load_lora_adapter("two", folder / "sql")  # beside law
        with pytest.raises(InvalidRequest, match="max_cpu_loras 2"):
            llm.load_lora_adapter("three", folder / "law")
        requests = [LoRARequest(name) for name in ("one", "two", "one", "two", "two", "one")]
        llm.flush_cache()  # those that find pages of the loop above round in other ways again
        found = answers_of(llm, prompts, requests)
        alone = [expected[LAW if one.lora_name == "one" else SQL][index] for index, one in enumerate(requests)]
        check_same_answers(alone, found, tolerance=NEAR_TIE)
        for name in ("one", "two"):
            llm.unload_lora_adapter(name)
        assert llm.get_metrics().adapters.n_bytes == 0


def test_each_rank_keeps_the_whole_files(tmp_path: Path) -> None:
    base = save(tmp_path / "base")
    modules = write_adapters(tmp_path, base)
    sizes = []
    for settings in ({}, TWO):
        with opened(base, lora_modules=modules, **settings) as llm:
            sizes.append(llm.get_metrics().adapters.n_bytes)
    assert sizes[0] == sizes[1]
