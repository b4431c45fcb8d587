"""Gemma 4 on a GPU, whose layers have heads of several shapes: attention, scores, hits, graphs and host memory.

Layers with windows have pages of their own, but where there is host memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cpu_oracle import check_hits, check_scores, first_difference
from gpu_support import VOCAB, check_same_answers, family, greedy, opened, random_ids, save, two_gpus
from safetensors.torch import load_file, save_file

from radixkv import LLM, SamplingParams
from radixkv.errors import ConfigError
from radixkv.runtime.device import factory

if torch.cuda.is_available():
    from attention_world import World, ints

    from radixkv.runtime.device.attention.cuda.base import AttentionShape
    from radixkv.runtime.device.kv_dtype import FP8

WINDOW, END = 100, 2
COMMON: Mapping[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": WINDOW,
    "eos_token_id": END,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.04,
}
"""Heads of the sizes of all published models."""
MODELS: dict[str, dict[str, Any]] = {
    "dense": {**COMMON, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "layer inputs": {
        **COMMON,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": VOCAB,
    },
    "experts": {
        **COMMON,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 16,
        "top_k_experts": 8,
        "moe_intermediate_size": 128,
    },
}
NOISE = 2.5
"""Allowed distance from float32, as a multiple of that of the CPU's own bfloat16."""


def near_tie(folder: Path) -> float:
    """Returns the difference of two log-probabilities that noise may turn round: eight times that of bfloat16."""
    return 0.6 if folder.name.startswith("experts") else 0.3


def save_gemma(folder: Path, name: str) -> Path:
    """Saves a checkpoint with small queries and outputs of experts.

    With others, rounding would decide what a token attends to, and by the choice of experts what it becomes.
    """
    save(folder, **MODELS[name])
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for key, values in tensors.items():
        if key.endswith("q_norm.weight"):
            values.mul_(0.075)
        if key.endswith("post_feedforward_layernorm_2.weight"):
            values.mul_(0.1)
    save_file(tensors, path, {"format": "pt"})
    return folder


@contextmanager
def on_gpu(folder: Path, *, has_windows: bool = True, **settings: Any) -> Iterator[LLM]:
    """Opens a model with few rows, so that it starts soon; all is consistent at the end."""
    with opened(folder, **{"max_num_seqs": 16, **settings}) as llm:
        assert (llm._open_loop.scheduler.states.window_stats() is not None) == has_windows
        yield llm
        llm._open_loop.check()


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gemma(tmp_path_factory.mktemp(request.param.replace(" ", "-")), request.param)


@pytest.fixture(params=[1, pytest.param(2, marks=two_gpus)])
def n_ranks(request: pytest.FixtureRequest) -> int:
    """Two ranks have the same KV head in layers with full attention, and in some models in all."""
    found: int = request.param
    return found


@pytest.mark.parametrize("variant", ["whole", "split", None])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("has_8_bits", [False, True])
@pytest.mark.parametrize("heads", [(32, 4, 512), (8, 1, 512), (16, 1, 512)])
def test_decode_with_heads_of_512(heads: Any, has_8_bits: bool, page_size: int, variant: Any) -> None:
    shape = shape_of(heads, page_size, has_8_bits=has_8_bits)
    world = World(shape, width=4096 // page_size, n_pages=32_768 // page_size, prefill_kernel="triton")
    lengths = ints([1, 15, 16, 17, 64, 65, 129, 700, 2048, 4000, 31])
    batch_slots = ints(world.random.permutation(64)[: len(lengths)])
    for batch_slot, length in zip(batch_slots, lengths, strict=True):
        world.fill(int(batch_slot), int(length))
    q = world.queries(len(batch_slots))
    expected = world.expected(batch_slots, lengths, ints([1] * len(lengths)), q)
    world.assert_close(world.decode(batch_slots, lengths, q, variant=variant), expected, len(lengths))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("has_8_bits", [False, True])
@pytest.mark.parametrize("window", [None, 300])
def test_prompts_with_heads_of_512(window: int | None, has_8_bits: bool, page_size: int) -> None:
    shape = shape_of((16, 2, 512), page_size, has_8_bits=has_8_bits)
    world = World(shape, [window], width=4096 // page_size, n_pages=16_384 // page_size, prefill_kernel="triton")
    starts, n_tokens = ints([0, 0, 512, 1536, 2000]), ints([1, 700, 128, 96, 33])
    batch_slots = ints([3, 9, 30, 63, 0])
    for batch_slot, start, n in zip(batch_slots, starts, n_tokens, strict=True):
        world.fill(int(batch_slot), int(start + n))
    q = world.queries(int(n_tokens.sum()))
    out = torch.full_like(q, math.nan)
    prompts = world.attention.plan_prompts(batch_slots, starts, n_tokens)
    world.attention.step(None, prompts).run(0, q, world.k, world.v, out)
    world.assert_close(out, world.expected(batch_slots, starts + n_tokens, n_tokens, q))


def shape_of(heads: tuple[int, int, int], page_size: int, *, has_8_bits: bool) -> AttentionShape:
    if has_8_bits and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU cannot convert 8-bit floats")
    kv_dtype = FP8 if has_8_bits else torch.bfloat16
    return AttentionShape(*heads, page_size, torch.bfloat16, heads[2] ** -0.5, kv_dtype)


@pytest.mark.parametrize(
    ("name", "settings", "noise"),
    [
        *((name, {}, NOISE) for name in MODELS),
        ("dense", {"page_size": 64, "enforce_eager": True}, NOISE),
        ("layer inputs", {"enforce_eager": True}, NOISE),
        ("dense", {"max_model_len": 96}, NOISE),
        ("layer inputs", {"kv_cache_dtype": "fp8"}, 20.0),
        *((name, {"quantization": "fp8"}, 40.0) for name in MODELS),
        *(
            pytest.param(name, {"tensor_parallel_size": 2, **settings}, noise, marks=two_gpus)
            for name, settings, noise in (
                *((name, {}, NOISE) for name in MODELS),
                ("dense", {"page_size": 64, "enforce_eager": True}, NOISE),
                ("layer inputs", {"kv_cache_dtype": "fp8"}, 20.0),
                *((name, {"quantization": "fp8"}, 40.0) for name in MODELS),
            )
        ),
    ],
)
def test_scores_are_those_of_the_cpu_up_to_rounding(
    name: str, settings: dict[str, Any], noise: float, tmp_path: Path
) -> None:
    """Prompts in chunks beside answers, and answers in batches. In sequences of 96 tokens no layer has a window."""
    folder = save_gemma(tmp_path, name)
    lengths = (500, 1, 333, 64, 17) if "max_model_len" not in settings else (60, 1, 33, 64, 17)
    has_windows = "max_model_len" not in settings
    with on_gpu(folder, has_windows=has_windows, max_num_batched_tokens=200, **settings) as llm:
        prompts = [random_ids(n, seed=n) for n in lengths]
        outputs = llm.generate(prompts, greedy(24, logprobs=20, prompt_logprobs=20), use_tqdm=False)
    check_scores(f"{name} {settings}", outputs, folder, noise)


def test_hits_have_the_bits_of_cold_prompts_whose_chunks_begin_at_the_same_places(
    n_ranks: int, folder: Path
) -> None:
    """Then products have as many rows, and rows of prompts begin at the same window pages. Pages and steps of 64
    tokens make all chunks so."""
    system = [*random_ids(200, seed=1), END]
    prompts = [[*system, *random_ids(n, seed=n), END, *random_ids(9, seed=n + 1)] for n in (100, 300, 60)]
    prompts += [[*prompts[0][:290], *random_ids(91, seed=seed)] for seed in (5, 6, 7)]
    params = greedy(12, logprobs=20)
    settings: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 1, "page_size": 64}
    settings["tensor_parallel_size"] = n_ranks
    windows = check_hits(
        partial(on_gpu, folder, **settings), prompts, params, n_found_first=4 * 192, n_found_again=192
    ).windows
    assert windows is not None
    assert windows.hits_total >= 10


def test_answers_in_graphs_are_those_without(n_ranks: int, folder: Path) -> None:
    """Numbers of rows between those of graphs, prompts short enough for them, and longer than piecewise graphs."""
    prompts = [random_ids(3 + 53 * i, seed=i) for i in range(13)]
    params = greedy(16, logprobs=20)
    with on_gpu(folder, enforce_eager=True, max_num_seqs=13, tensor_parallel_size=n_ranks) as llm:
        eager = llm.generate(prompts, params, use_tqdm=False)
    with on_gpu(folder, max_num_seqs=64, tensor_parallel_size=n_ranks) as llm:
        for n in (13, 5, 3, 1):
            found = llm.generate(prompts[:n], params, use_tqdm=False)
            shares = [first_difference(*pair) for pair in zip(eager[:n], found, strict=True)]
            print(f"{n} rows: equal for {shares} of 16 tokens")
            answers = [one.outputs[0].token_ids for one in found]
            check_same_answers(eager[:n], answers, tolerance=near_tie(folder), min_share=0.4)


def test_many_requests_that_share_prefixes_in_few_pages(n_ranks: int, folder: Path) -> None:
    """Pages are evicted to host memory and come back in all their parts; requests are preempted and forked."""
    prompts = [one[:900] for one in family(60, seed=3)]
    params = greedy(12, logprobs=20)
    with on_gpu(folder, enable_prefix_caching=False, tensor_parallel_size=n_ranks) as llm:
        alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    settings: dict[str, Any] = {"max_total_tokens": 4096, "max_num_batched_tokens": 300}
    settings["tensor_parallel_size"] = n_ranks
    with on_gpu(folder, host_memory_bytes=1 << 30, **settings) as llm:
        for turn in range(2):
            found = llm.generate(prompts, params, use_tqdm=False)
            n_cached = sum(one.num_cached_tokens or 0 for one in found)
            equal = [first_difference(*pair) for pair in zip(alone, found, strict=True)]
            print(f"turn {turn}: {n_cached} cached tokens, equal for {sum(equal) / len(equal):.1f} of 12 tokens")
            answers = [one.outputs[0].token_ids for one in found]
            check_same_answers(alone, answers, tolerance=near_tie(folder), min_share=0.5)
            assert n_cached > 0


def test_answers_with_drafts_are_those_without(folder: Path) -> None:
    """A draft is a row whose pages are read once with those of its token, also with heads of 512."""
    prompt = random_ids(60, seed=1) * 4
    params = greedy(40, logprobs=20)
    with on_gpu(folder) as llm:
        plain = llm.generate([prompt], params, use_tqdm=False)
    with on_gpu(folder, speculative_config={"method": "ngram", "num_speculative_tokens": 4}) as llm:
        found = llm.generate([prompt], params, use_tqdm=False)
    print("equal for", first_difference(plain[0], found[0]), "of 40 tokens")
    check_same_answers(plain, [found[0].outputs[0].token_ids], tolerance=near_tie(folder), min_share=0.0)


def test_long_chats_beyond_the_window(folder: Path) -> None:
    """Each turn goes on behind the one before, also where the template repeats the answer."""
    chats = [[*random_ids(300, seed=1), END, *random_ids(40 + i, seed=2 + i), END] for i in range(4)]
    with on_gpu(folder) as llm, on_gpu(folder, enable_prefix_caching=False) as cold:
        for turn in range(4):
            found = llm.generate(chats, greedy(60, logprobs=20), use_tqdm=False)
            alone = [cold.generate([chat], greedy(60, logprobs=20), use_tqdm=False)[0] for chat in chats]
            cached = [one.num_cached_tokens or 0 for one in found]
            equal = [first_difference(*pair) for pair in zip(alone, found, strict=True)]
            print(f"turn {turn}: {cached} cached of {[len(chat) for chat in chats]}, {equal} of 60 tokens equal")
            answers = [one.outputs[0].token_ids for one in found]
            check_same_answers(alone, answers, tolerance=near_tie(folder), min_share=0.1)
            if turn:
                assert all(n > len(chat) - 120 for n, chat in zip(cached, chats, strict=True))
            chats = [
                [*chat, *one.outputs[0].token_ids, END, *random_ids(20, seed=turn), END]
                for chat, one in zip(chats, found, strict=True)
            ]


def test_many_requests_with_few_slabs(folder: Path) -> None:
    """Tails and pages are evicted, slabs change their use, and requests are preempted: answers stay right."""
    prompts = [one[:900] for one in family(60, seed=3)]
    params = greedy(12, logprobs=20)
    with on_gpu(folder, enable_prefix_caching=False) as llm:
        alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    with on_gpu(
        folder,
        max_model_len=1024,
        max_num_seqs=12,
        max_total_tokens=3072,
        max_num_batched_tokens=300,
        num_reserved_decode_tokens=0,
    ) as llm:
        for turn in range(2):
            found = llm.generate(prompts, params, use_tqdm=False)
            stats = llm.get_metrics()
            n_cached = sum(one.num_cached_tokens or 0 for one in found)
            equal = [first_difference(*pair) for pair in zip(alone, found, strict=True)]
            print(
                f"turn {turn}: {n_cached} cached tokens, {stats.preemptions_total} preemptions, {stats.windows}, "
                f"equal for {sum(equal) / len(equal):.1f} of 12 tokens"
            )
            answers = [one.outputs[0].token_ids for one in found]
            check_same_answers(alone, answers, tolerance=near_tie(folder), min_share=0.5)
            assert n_cached > 0


def test_choices_are_those_with_pages_of_all_layers(folder: Path) -> None:
    """Forks copy part of a window page."""
    prompts = [random_ids(n, seed=n) for n in (70, 200, 333)]
    params = SamplingParams(n=4, temperature=0.8, seed=3, max_tokens=60, logprobs=20, ignore_eos=True)
    with on_gpu(folder) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
    no_windows = patch.object(factory, "are_mixed", return_value=False)
    with no_windows, on_gpu(folder, has_windows=False) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    equal = [
        one.token_ids == other.token_ids
        for a, b in zip(found, expected, strict=True)
        for one, other in zip(a.outputs, b.outputs, strict=True)
    ]
    print(f"{sum(equal)} of {len(equal)} choices are equal")
    assert sum(equal) >= 0.25 * len(equal), "most answers differ, and not by rounding alone"


def test_a_pool_holds_more_tokens_than_with_pages_of_all_layers(folder: Path) -> None:
    """Requests that did not fit before run at once."""
    prompts = [random_ids(1800, seed=seed) for seed in range(16)]
    with on_gpu(folder, max_total_tokens=16 * 1800, max_num_batched_tokens=512) as llm:
        n_pages = llm.get_metrics().n_pages
        llm.generate(prompts, greedy(100), use_tqdm=False)
        assert llm.get_metrics().preemptions_total == 0
    assert n_pages * 16 > 1.2 * 16 * 1800


def test_flashinfer_is_refused_by_name(tmp_path: Path) -> None:
    folder = save_gemma(tmp_path, "dense")
    with (
        pytest.raises(ConfigError, match=r"flashinfer.*several shapes.*set attention_backend to triton"),
        on_gpu(folder, attention_backend="flashinfer"),
    ):
        pass
