"""Adapters on a CUDA device: answers are those of merged models, whatever is beside them.

Merged models are computed on the CPU in float32; answers of one engine are compared with those of the same requests
one by one, or without graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_oracle import check_same_bits, check_scores, first_difference
from gpu_drive import loop_of
from gpu_support import (
    NEAR_TIE,
    SHAPE,
    check_same_answers,
    greedy,
    opened,
    random_ids,
    save,
)
from test_gpu_models import ARCHITECTURES

from radixkv import LLM, LoRARequest, RequestOutput
from radixkv.checkpoints import resolve
from radixkv.errors import InvalidRequest
from radixkv.settings.speculative import DEFAULT_SPECULATION
from radixkv.wire.adapter_messages import AdapterLoaded, LoadAdapter, UnloadAdapter
from radixkv.wire.messages import Done, Failed, FromRuntime, Submit, Tokens, pack_tokens, unpack_tokens
from radixkv.wire.namespace import CacheNamespace
from support.device_support import load_oracle
from support.lora import linear_modules, merge, save_adapter
from support.quantized_checkpoints import save_quantized

NOISE = 2.0
"""Allowed distance from float32, as a multiple of that of the merged model in bfloat16."""
SQL, LAW = LoRARequest("sql"), LoRARequest("law")
LENGTHS = (700, 1, 333, 64, 17, 40)
KINDS = ("llama", "qwen2", "gemma3", "opt", "mistral-window", "mixtral")
MODULE_ENDS = {"q_proj", "down_proj", "fc2"}


def write_adapters(folder: Path, base: Path) -> dict[str, Path]:
    """Writes two adapters of a model, and the two merged models; returns the adapters' folders by name."""
    made: dict[str, Path] = {}
    for name, seed, rank in (("sql", 2, 8), ("law", 3, 13)):
        model = load_oracle(resolve(str(base)))
        modules = linear_modules(model) if name == "sql" else linear_modules(model, MODULE_ENDS)
        made[name] = save_adapter(
            folder / name, model, modules, seed=seed, rank=rank, lora_alpha=4, use_rslora=name == "law"
        )
        merge(model, made[name]).save_pretrained(folder / f"merged-{name}")
    return made


def merged(base: Path, folder: Path, request: LoRARequest | None) -> Path:
    return base if request is None else folder / f"merged-{request.lora_name}"


def check_against_merged(
    base: Path, folder: Path, noise: float = NOISE, oracle: Path | None = None, **settings: Any
) -> None:
    """Checks logprobs of ragged chunked prompts and of answers, of the model and two adapters in the same steps."""
    modules = write_adapters(folder, oracle or base)
    requests = [SQL, None, LAW, SQL, LAW, None]
    prompts = [random_ids(n, seed=n) for n in LENGTHS]
    defaults = {"max_num_batched_tokens": 512, "attention_backend": "triton"}
    with opened(base, lora_modules=modules, **(defaults | settings)) as llm:
        outputs = llm.generate(
            prompts, greedy(24, logprobs=20, prompt_logprobs=20), use_tqdm=False, lora_request=requests
        )
    for request in (None, SQL, LAW):
        own = [output for output, one in zip(outputs, requests, strict=True) if one == request]
        check_scores(str(request), own, merged(oracle or base, folder, request), noise, min_share=0.8)


@pytest.mark.parametrize("name", KINDS)
def test_scores_are_those_of_merged_models(name: str, tmp_path: Path) -> None:
    check_against_merged(save(tmp_path / "base", **ARCHITECTURES[name]), tmp_path)


def test_scores_without_graphs(tmp_path: Path) -> None:
    check_against_merged(save(tmp_path / "base"), tmp_path, enforce_eager=True)


@pytest.mark.parametrize("format_name", ["fp8 channels", "fp8 blocks", "awq"])
def test_scores_beside_quantized_weights(format_name: str, tmp_path: Path) -> None:
    """The merged models are made of the dense matrices that the checkpoint stands for."""
    save_quantized(tmp_path, format_name, **{**SHAPE, "initializer_range": 0.02})
    noise = 40.0 if format_name.startswith("fp8") else NOISE
    check_against_merged(tmp_path / "quantized", tmp_path, noise, tmp_path / "dense")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, sensitive_folder: Path) -> Path:
    """Two adapters of the sensitive checkpoint."""
    folder = tmp_path_factory.mktemp("adapters")
    write_adapters(folder, sensitive_folder)
    return folder


def with_adapters(sensitive_folder: Path, folder: Path, **settings: Any) -> dict[str, Any]:
    """Returns the arguments of an engine with both adapters."""
    modules = {name: folder / name for name in ("sql", "law")}
    return {"model": sensitive_folder, "lora_modules": modules, "attention_backend": "triton", **settings}


@pytest.fixture(scope="module")
def one_by_one(sensitive_folder: Path, folder: Path) -> Iterator[LLM]:
    """An engine without the cache and without graphs."""
    with opened(**with_adapters(sensitive_folder, folder, enable_prefix_caching=False, enforce_eager=True)) as llm:
        yield llm


def answers_of(llm: LLM, prompts: Sequence[list[int]], requests: Sequence[LoRARequest | None]) -> list[list[int]]:
    outputs = llm.generate(
        [list(prompt) for prompt in prompts], greedy(16), use_tqdm=False, lora_request=list(requests)
    )
    return [output.outputs[0].token_ids for output in outputs]


def alone_of(llm: LLM, prompts: Sequence[list[int]], requests: Sequence[LoRARequest | None]) -> list[RequestOutput]:
    params = greedy(16, logprobs=20)
    return [
        llm.generate([prompt], params, use_tqdm=False, lora_request=request)[0]
        for prompt, request in zip(prompts, requests, strict=True)
    ]


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 200}, {"speculative_config": DEFAULT_SPECULATION}]
)
def test_a_batch_of_the_model_and_adapters(
    settings: dict[str, Any], sensitive_folder: Path, folder: Path, one_by_one: LLM
) -> None:
    """With graphs and hits, beside the same requests one by one without either; the second time warm."""
    prompts = [random_ids(10 + 7 * index, seed=index % 20) for index in range(48)]
    requests = [(None, SQL, LAW)[index % 3] for index in range(48)]
    expected = alone_of(one_by_one, prompts, requests)
    with opened(**with_adapters(sensitive_folder, folder, **settings)) as llm:
        for _ in range(2):
            check_same_answers(expected, answers_of(llm, prompts, requests), tolerance=NEAR_TIE)
        assert llm.get_metrics().prefix_hits_total > 0


def test_activated_adapters_share_the_pages_of_the_model(sensitive_folder: Path, folder: Path) -> None:
    """Answers are those of the CPU, whose activated adapters are PEFT's; prompts before the invocation are hits."""
    modules = {}
    for name, seed in (("sql", 2), ("law", 3)):
        oracle = load_oracle(resolve(str(sensitive_folder)))
        modules[name] = save_adapter(
            folder / f"activated-{name}",
            oracle,
            linear_modules(oracle),
            seed=seed,
            rank=8,
            lora_alpha=4,
            alora_invocation_tokens=[7, 8],
        )
    prompts = [[*random_ids(90 + 13 * index, seed=index), 7, 8, *random_ids(5, seed=99)] for index in range(12)]
    requests = [(SQL, LAW)[index % 2] for index in range(12)]
    settings: dict[str, Any] = {"lora_modules": modules}
    with opened(sensitive_folder, device="cpu", dtype="float32", **settings) as llm:
        expected = alone_of(llm, prompts, requests)
    with opened(sensitive_folder, attention_backend="triton", max_num_batched_tokens=200, **settings) as llm:
        llm.generate([prompt[:-7] for prompt in prompts], greedy(1), use_tqdm=False)  # by the model alone
        for _ in range(2):
            outputs = llm.generate(prompts, greedy(16), use_tqdm=False, lora_request=list(requests))
            check_same_answers(expected, [output.outputs[0].token_ids for output in outputs], tolerance=NEAR_TIE)
            assert all(output.num_cached_tokens >= len(output.prompt_token_ids) - 7 - 16 for output in outputs)


def test_an_adapter_that_is_ignored_would_be_seen(one_by_one: LLM) -> None:
    prompts = [random_ids(100, seed) for seed in range(8)]
    expected = alone_of(one_by_one, prompts, [SQL] * 8)
    for request in (None, LAW):
        with pytest.raises(AssertionError):
            check_same_answers(
                expected, answers_of(one_by_one, prompts, [request] * 8), tolerance=NEAR_TIE, min_share=0.6
            )


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_steps_without_adapters_keep_their_bits(
    quantization: str | None, sensitive_folder: Path, folder: Path
) -> None:
    """They are computed as without LoRA, by the fused kernels and their graphs."""
    prompts = [random_ids(n, seed=n) for n in (1, 33, 400, 900)]
    found: list[list[RequestOutput]] = []
    plain = {"attention_backend": "triton", "quantization": quantization}
    for settings in (
        {"model": sensitive_folder, **plain},
        with_adapters(sensitive_folder, folder, **plain),
    ):
        with opened(**settings) as llm:
            if "lora_modules" in settings:
                answers_of(llm, prompts, [SQL] * 4)
            params = greedy(24, logprobs=20)
            found.append([llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts])
    check_same_bits(*found)


def test_adapters_come_and_go_in_few_slots(sensitive_folder: Path, folder: Path, one_by_one: LLM) -> None:
    """Each name takes the slot that another has left, and graphs go on; requests for both take turns."""
    prompts = [random_ids(50, seed) for seed in range(6)]
    expected = {request: alone_of(one_by_one, prompts, [request] * 6) for request in (SQL, LAW)}
    settings = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "attention_backend": "triton"}
    with opened(sensitive_folder, **settings) as llm:
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
        found = answers_of(llm, prompts, requests)
        alone = [expected[LAW if one.lora_name == "one" else SQL][index] for index, one in enumerate(requests)]
        check_same_answers(alone, found, tolerance=NEAR_TIE)


def test_loads_and_unloads_beside_running_answers(sensitive_folder: Path, folder: Path, one_by_one: LLM) -> None:
    """Running answers are what they are alone, also those whose adapter loses its name meanwhile."""
    prompts = [random_ids(40, seed) for seed in range(8)]
    expected = {request: alone_of(one_by_one, prompts, [request] * 8) for request in (None, SQL)}
    with opened(sensitive_folder, enable_lora=True, max_loras=2, attention_backend="triton") as llm:
        loop, answers, ends = loop_of(llm), dict[str, list[int]](), dict[str, FromRuntime]()
        replies: list[FromRuntime] = []
        params = greedy(16)

        def submit(name: str, index: int, adapter: str = "") -> None:
            answers[name] = []
            assert not loop.receive(
                Submit(name, pack_tokens(prompts[index]), params, CacheNamespace(adapter=adapter))
            )

        def turn() -> None:
            for message in loop.turn():
                match message:
                    case Tokens():
                        for item in message.items:
                            answers[item.id] += unpack_tokens(item.tokens)
                    case Done() | Failed():
                        ends[message.id] = message
                    case _:
                        replies.append(message)

        for index in range(8):
            submit(f"base {index}", index)
        for _ in range(4):
            turn()
        assert not loop.receive(LoadAdapter("load", "sql", str(folder / "sql")))
        while not replies:
            turn()
        (loaded,) = replies
        assert isinstance(loaded, AdapterLoaded)
        for index in range(8):
            submit(f"sql {index}", index, loaded.adapter.digest)
        for _ in range(4):
            turn()
        assert not loop.receive(UnloadAdapter("load"))
        while loop.has_work:
            turn()
        loop.check()
        assert llm.get_metrics().adapters.n_adapters == 0
        assert llm.get_metrics().adapters.n_bytes == 0
    assert len(ends) == 16
    assert all(isinstance(end, Done) for end in ends.values())
    for name, request in (("base", None), ("sql", SQL)):
        check_same_answers(
            expected[request], [answers[f"{name} {index}"] for index in range(8)], tolerance=NEAR_TIE
        )


def test_steps_of_one_row_with_and_without_graphs_agree(
    sensitive_folder: Path, folder: Path, one_by_one: LLM
) -> None:
    prompts = [random_ids(n, seed=n) for n in (3, 65, 500)]
    expected = alone_of(one_by_one, prompts, [LAW] * 3)
    with opened(**with_adapters(sensitive_folder, folder, enable_prefix_caching=False)) as llm:
        found = alone_of(llm, prompts, [LAW] * 3)
    assert sum(first_difference(*pair) for pair in zip(found, expected, strict=True)) >= 0.6 * 48


def test_memory_of_adapters_is_free_after_shutdown(sensitive_folder: Path, folder: Path) -> None:
    clear_workspaces = torch._C._cuda_clearCublasWorkspaces  # of 32 MiB for each stream, which torch keeps
    clear_workspaces()
    before = torch.cuda.memory_allocated()
    with opened(**with_adapters(sensitive_folder, folder)) as llm:
        answers_of(llm, [random_ids(20, 1)], [SQL])
        assert torch.cuda.memory_allocated() > before
    clear_workspaces()
    assert torch.cuda.memory_allocated() <= before
