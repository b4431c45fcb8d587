"""Models with gated delta nets on a GPU against float64, the CPU, and themselves alone, cold and without graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_oracle import check_same_bits, check_scores, first_difference
from gpu_support import SHAPE, check_same_answers, family, greedy, opened, random_ids, save

from radixkv import LLM

DELTA_NETS: Mapping[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "eos_token_id": 2,
    "initializer_range": 0.02,
}
"""Heads of the size of all published models. With these weights another prefix changes log-probabilities fifteen
times as much as rounding to bfloat16 does; with larger ones four times."""
EXPERTS: Mapping[str, Any] = {
    "num_experts": 16,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3.5": {"model_type": "qwen3_5_text", **DELTA_NETS},
    "qwen3.5-moe": {"model_type": "qwen3_5_moe_text", **DELTA_NETS, **EXPERTS},
    "qwen3-next": {"model_type": "qwen3_next", **DELTA_NETS, **EXPERTS},
}
STATE_BYTES = 3 * (4 * 128 * 128 * 4 + 3 * 1024 * 2)
"""The states of a sequence in bfloat16."""
NOISE = 2.5
"""Allowed distance from float32, as a multiple of that of the CPU's own bfloat16."""
NEAR_TIE = 0.3
"""Difference of two log-probabilities that noise may turn round."""
END = 2
"""A token that ends a message."""


@contextmanager
def on_gpu(folder: Path, **settings: Any) -> Iterator[LLM]:
    """Opens a model whose prompts run on the Triton kernel, so that nothing is compiled by nvcc."""
    with opened(folder, **{"attention_backend": "triton", "max_num_seqs": 16, **settings}) as llm:
        yield llm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("hybrid"), **MODELS["qwen3.5"])


def test_a_layer_of_model_size_follows_the_rule() -> None:
    """With rows of one token, ragged prompts, starts within blocks, padding and saved states."""
    # Imported here, because it imports Triton, which is not installed where these tests are skipped.
    from delta_net_world import PADDING, Span, World, check, delta_net

    spans = [
        Span(3, 5, 1, is_decode=True),
        Span(0, 0, 1, is_decode=True),
        Span(PADDING, 0, 1, is_decode=True),
        Span(1, 0, 64),
        Span(4, 64, 1),
        Span(2, 40, 300, saves={64: 2, 128: 1, 320: 0}),
        Span(5, 0, 191),
    ]
    config = delta_net(16, 32, 128, 128)
    for dtype in (torch.bfloat16, torch.float16):
        check(World(config, spans, dtype))


@pytest.mark.parametrize(
    ("name", "settings", "noise"),
    [
        *((name, {}, NOISE) for name in MODELS),
        ("qwen3.5", {"page_size": 64, "enforce_eager": True}, NOISE),
        ("qwen3.5", {"quantization": "fp8"}, 40.0),
    ],
)
def test_scores_are_those_of_the_cpu_up_to_rounding(
    name: str, settings: dict[str, Any], noise: float, tmp_path: Path
) -> None:
    """Prompts in chunks beside answers, and answers in batches, teacher-forced on the CPU in float32."""
    folder = save(tmp_path, **MODELS[name])
    prompts = [random_ids(n, seed=n) for n in (500, 1, 333, 64, 17)]
    with on_gpu(folder, max_num_batched_tokens=200, **settings) as llm:
        outputs = llm.generate(prompts, greedy(24, logprobs=20, prompt_logprobs=20), use_tqdm=False)
    check_scores(f"{name} {settings}", outputs, folder, noise)


def test_hits_have_the_bits_of_cold_prompts_whose_chunks_begin_at_the_same_places(folder: Path) -> None:
    """Then products have as many rows, and blocks the same tokens. Steps of 64 tokens make all chunks so."""
    system = [*random_ids(200, seed=1), END]
    prompts = [[*system, *random_ids(n, seed=n), END, *random_ids(9, seed=n + 1)] for n in (100, 300, 60)]
    prompts += [[*prompts[0][:290], *random_ids(90, seed=seed)] for seed in (5, 6, 7)]
    params = greedy(12, logprobs=20)
    settings: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "page_size": 16}
    with on_gpu(folder, enable_prefix_caching=False, **settings) as llm:
        cold = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    with on_gpu(folder, **settings) as llm:
        first = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
        again = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    print("cached tokens", [one.num_cached_tokens for one in first], [one.num_cached_tokens for one in again])
    assert sum(one.num_cached_tokens or 0 for one in first) >= 4 * 192
    assert all((one.num_cached_tokens or 0) >= 192 for one in again)
    for found in (first, again):
        check_same_bits(found, cold)


def test_answers_in_graphs_are_those_without(folder: Path) -> None:
    """Numbers of rows between those of graphs: padding must not change a state."""
    prompts = [random_ids(20 + 13 * i, seed=i) for i in range(13)]
    params = greedy(16, logprobs=20)
    with on_gpu(folder, enforce_eager=True, max_num_seqs=13) as llm:
        eager = llm.generate(prompts, params, use_tqdm=False)
    with on_gpu(folder, max_num_seqs=64) as llm:
        for n in (13, 5, 3, 1):
            found = llm.generate(prompts[:n], params, use_tqdm=False)
            shares = [first_difference(*pair) for pair in zip(eager[:n], found, strict=True)]
            print(f"{n} rows: equal for {shares} of 16 tokens")
            answers = [one.outputs[0].token_ids for one in found]
            check_same_answers(eager[:n], answers, tolerance=NEAR_TIE, min_share=0.4)


def test_many_requests_with_few_states_and_few_pages(folder: Path) -> None:
    """States are evicted and replaced while others load them, and requests are preempted: answers stay right."""
    prompts = [one[:900] for one in family(120, seed=3)]
    params = greedy(12, logprobs=20)
    with on_gpu(folder, enable_prefix_caching=False) as llm:
        alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    with on_gpu(
        folder,
        state_memory_bytes=5 * STATE_BYTES,
        max_num_seqs=7,
        max_total_tokens=4096,
        max_num_batched_tokens=300,
    ) as llm:
        for turn in range(2):
            found = llm.generate(prompts, params, use_tqdm=False)
            stats = llm.get_metrics()
            n_cached = sum(one.num_cached_tokens or 0 for one in found)
            equal = [first_difference(*pair) for pair in zip(alone, found, strict=True)]
            print(
                f"turn {turn}: {n_cached} cached tokens, {stats.preemptions_total} preemptions, "
                f"equal for {sum(equal) / len(equal):.1f} of 12 tokens on average"
            )
            answers = [one.outputs[0].token_ids for one in found]
            check_same_answers(alone, answers, tolerance=NEAR_TIE, min_share=0.5)
            assert n_cached > 0


def test_a_request_keeps_its_state_while_others_come_and_go(folder: Path) -> None:
    """A long answer beside prompts in chunks, short answers, and batch slots that change hands."""
    long, others = random_ids(100, seed=50), [random_ids(30 + 40 * i, seed=60 + i) for i in range(30)]
    with on_gpu(folder, max_num_seqs=4, max_num_batched_tokens=128) as llm:
        (alone,) = llm.generate([long], greedy(80, logprobs=20), use_tqdm=False)
        params = [greedy(80, logprobs=20), *(greedy(1 + i % 5) for i in range(30))]
        beside = llm.generate([long, *others], params, use_tqdm=False)
    print("equal for", first_difference(alone, beside[0]), "tokens")
    check_same_answers([alone], [beside[0].outputs[0].token_ids], tolerance=NEAR_TIE, min_share=0.0)


def test_the_sizes_of_states_are_what_the_settings_say(folder: Path) -> None:
    from gpu_drive import executor_of

    assert SHAPE["num_hidden_layers"] == 4
    with on_gpu(folder, state_memory_bytes=3 * STATE_BYTES) as llm:
        assert executor_of(llm).n_states == 3
    with on_gpu(folder, state_memory_bytes=4 * STATE_BYTES - 1) as llm:
        assert executor_of(llm).n_states == 3
