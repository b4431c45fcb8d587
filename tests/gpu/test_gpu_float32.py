"""CUDA's decoder in float32 against Transformers and the CPU, up to rounding, and that users cannot open it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from float32_oracle import opened_in_float32
from gpu_support import VOCAB, engine_scores, greedy, opened, oracle_scores, random_ids, save, sequence_of

from radixkv import LLM
from radixkv.errors import ConfigError
from radixkv.llm.outputs import RequestOutput

pytestmark = pytest.mark.gpu

GEMMA4: Mapping[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "head_dim": 32,
    "global_head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 100,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.04,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-head-32-tied": {"head_dim": 32, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "qwen2-head-16": {"model_type": "qwen2", "hidden_size": 128, "head_dim": 16},
    "qwen3-head-256": {"model_type": "qwen3", "head_dim": 256, "num_attention_heads": 4},
    "mistral-window": {"model_type": "mistral", "sliding_window": 100},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        "num_experts": 20,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 96,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "initializer_range": 0.02,
        "head_dim": 64,
        "sliding_window": 100,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
    },
    "gemma4": {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4-layer-inputs": {
        **GEMMA4,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB,
    },
    "gemma4-experts": {
        **GEMMA4,
        "enable_moe_block": True,
        "num_experts": 20,
        "top_k_experts": 6,
        "moe_intermediate_size": 96,
    },
}
LENGTHS = (600, 1, 333, 64, 17)
ROUNDING = 1e-4
"""Rounding error of a log-probability; TF32 products would exceed it ten times."""


@pytest.mark.parametrize(
    ("name", "page_size"), [*((name, 16) for name in ARCHITECTURES), ("llama", 1), ("mistral-window", 64)]
)
def test_scores_are_those_of_transformers(name: str, page_size: int, tmp_path: Path) -> None:
    """Runs chunked prompts beside decode rows, then the same requests mostly from the cache."""
    folder = save(tmp_path, **ARCHITECTURES[name])
    # Ids below 10 may end a message, where Gemma 4's cache would keep window pages instead of at the prompt's end.
    # Other prompts, because two experts of qwen3-moe are nearly equal for a token of these: 2e-6 apart.
    smallest = 10 if name.startswith("gemma4") else 0
    prompts = [[max(each, smallest) for each in random_ids(n, seed=n)] for n in LENGTHS]
    with opened_in_float32(folder, page_size=page_size, max_num_batched_tokens=200) as llm:
        cold = llm.generate(prompts, greedy(24, logprobs=5, prompt_logprobs=5), use_tqdm=False)
        warm = llm.generate(prompts, greedy(24, logprobs=5), use_tqdm=False)
    assert sum(output.num_cached_tokens for output in warm) > 850
    check(folder, [*cold, *warm])


def test_a_decode_step_of_many_rows(tmp_path: Path) -> None:
    folder = save(tmp_path, **ARCHITECTURES["llama"])
    prompts = [random_ids(5 + 7 * i, seed=i) for i in range(64)]
    with opened_in_float32(folder) as llm:
        check(folder, llm.generate(prompts, greedy(16, logprobs=5), use_tqdm=False))


def check(folder: Path, outputs: Sequence[RequestOutput]) -> None:
    """Checks log-probabilities, and that each token is the likeliest one up to rounding."""
    exact = oracle_scores(folder, [sequence_of(output) for output in outputs], torch.float32)
    misses = []
    for output, expected in zip(outputs, exact, strict=True):
        for found in engine_scores(output):
            misses += [abs(score - float(expected[position][token])) for (position, token), score in found.items()]
        for position, token in enumerate(output.outputs[0].token_ids, len(output.prompt_token_ids)):
            assert float(expected[position].max() - expected[position][token]) < 2 * ROUNDING
    print(f"{len(misses)} scores, off by at most {max(misses):.1e}")
    assert max(misses) < ROUNDING


@pytest.mark.parametrize("name", ["embedded", "sensitive"])
def test_log_probabilities_equal_those_of_the_cpu(name: str, sensitive: Path) -> None:
    """Both models have heads of 32 dimensions, for which attention has no kernel."""
    model = sensitive if name == "sensitive" else "tiny"
    prompts = [random_ids(40 + 100 * i, seed=i) for i in range(4)]
    settings = {"max_total_tokens": 8192, "max_num_seqs": 8, "max_model_len": None}
    with opened_in_float32(model, **settings) as llm:
        found = first_scores(llm, prompts)
    with opened(model, device="cpu", dtype="float32", **settings) as llm:
        assert found == pytest.approx(first_scores(llm, prompts), abs=1e-3)


def first_scores(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[float]:
    """Returns log-probabilities of the likeliest first tokens, before any near-tie can change an answer."""
    outputs = llm.generate(prompts, greedy(2, logprobs=5), use_tqdm=False)
    firsts = [(output.outputs[0].logprobs or [{}])[0] for output in outputs]
    assert all(firsts)
    return [each.logprob for first in firsts for each in first.values()]


def test_float32_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="float32 .*CUDA; use bfloat16 or float16, or set device to cpu"):
        LLM(save(tmp_path), device="cuda", dtype="float32")
