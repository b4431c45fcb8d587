"""The architectures on CUDA against Transformers in the same dtype, both measured against float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_support import (
    SHAPE,
    deviation,
    engine_scores,
    greedy,
    opened,
    oracle_scores,
    random_ids,
    save,
    sequence_of,
)

from support.quantized_checkpoints import INT4_FORMATS, save_quantized

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3},
    "llama-tied-whole": {"num_key_value_heads": 8, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "llama-head-64": {"head_dim": 64},
    "qwen3-head-64": {"model_type": "qwen3", "head_dim": 64, "num_attention_heads": 12, "num_key_value_heads": 4},
    "llama-head-256": {"head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gemma3": {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 100,
        "sliding_window": 100,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "opt": {
        "model_type": "opt",
        "ffn_dim": 512,
        "word_embed_proj_dim": 512,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "init_std": 0.05,
    },
    "mistral-window": {"model_type": "mistral", "sliding_window": 100},
    # In 16 bits, routers send some tokens to other experts; each expert has a small share of its token here.
    "mixtral": {
        "model_type": "mixtral",
        "sliding_window": None,
        "intermediate_size": 256,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 192,
    },
    # Wider weights make routers so unsteady that bfloat16 hides what sinks do.
    "gpt-oss": {
        "model_type": "gpt_oss",
        "initializer_range": 0.02,
        "hidden_size": 480,
        "intermediate_size": 480,
        "num_attention_heads": 16,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 8,
    },
}
"""The first five need only kernels for a head size of 128, which most models have."""

LENGTHS = (900, 1, 333, 64, 17)
N_NEW = 40
N_TOP = 8
NOISE = 1.5
"""Allowed distance from float32, as a multiple of Transformers' own."""


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_are_as_near_to_float32_as_those_of_transformers(name: str, tmp_path: Path) -> None:
    compare(save(tmp_path, **ARCHITECTURES[name]), "bfloat16")


@pytest.mark.parametrize("page_size", [1, 32, 64])
def test_scores_with_other_page_sizes(page_size: int, tmp_path: Path) -> None:
    compare(save(tmp_path, **ARCHITECTURES["llama"]), "bfloat16", page_size=page_size)


def test_scores_of_requests_that_are_longer_than_the_pool(tmp_path: Path) -> None:
    """Without the tree, pages behind the windows of all layers go back while a request runs."""
    folder = save(tmp_path, **ARCHITECTURES["mistral-window"])
    compare(folder, "bfloat16", enable_prefix_caching=False, max_total_tokens=640)


def test_scores_in_float16(tmp_path: Path) -> None:
    compare(save(tmp_path, **ARCHITECTURES["qwen3"]), "float16")


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_scores_with_k_and_v_in_8_bits(name: str, tmp_path: Path) -> None:
    """The oracle has K and V in 32 bits. Without its sinks, GPT-OSS would be off by more."""
    compare(save(tmp_path, **ARCHITECTURES[name]), "bfloat16", noise=10.0, kv_cache_dtype="fp8")


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_scores_with_weights_rounded_to_fp8(name: str, tmp_path: Path) -> None:
    """FP8 has three bits of fraction, bfloat16 seven: errors are some twenty times those of bfloat16."""
    compare(save(tmp_path, **ARCHITECTURES[name]), "bfloat16", noise=40.0, quantization="fp8")


@pytest.mark.parametrize("format_name", ["fp8 channels", "fp8 tensor", "fp8 blocks", "awq", *INT4_FORMATS, "mxfp4"])
def test_scores_of_quantized_checkpoints(format_name: str, tmp_path: Path) -> None:
    """The oracle has the dense matrices that the checkpoint stands for. Only FP8 rounds activations too."""
    changes = ARCHITECTURES["gpt-oss"] if format_name == "mxfp4" else {}
    save_quantized(tmp_path, format_name, **{**SHAPE, "initializer_range": 0.02, **changes})
    noise = 40.0 if format_name.startswith("fp8") else NOISE
    compare(tmp_path / "quantized", "bfloat16", noise=noise, oracle=tmp_path / "dense")


def compare(folder: Path, dtype: str, *, noise: float = NOISE, oracle: Path | None = None, **settings: Any) -> None:
    """Compares log-probabilities of ragged chunked prompts and of decode rows with two runs of Transformers."""
    prompts = [random_ids(n, seed=n) for n in LENGTHS]
    with opened(folder, dtype=dtype, max_num_batched_tokens=512, **settings) as llm:
        outputs = llm.generate(prompts, greedy(N_NEW, logprobs=20, prompt_logprobs=20), use_tqdm=False)
    sequences = [sequence_of(output) for output in outputs]
    exact = oracle_scores(oracle or folder, sequences, torch.float32)
    rounded = oracle_scores(oracle or folder, sequences, getattr(torch, dtype))
    for part in (0, 1):  # of the prompt, of the answer
        ours: list[float] = []
        theirs: list[float] = []
        n_expected = 0
        for output, expected, near in zip(outputs, exact, rounded, strict=True):
            found = engine_scores(output)[part]
            for position in {position for position, _ in found}:
                # Chosen by the exact scores: ours would favour tokens that our own noise has raised.
                for token in expected[position].topk(N_TOP).indices.tolist():
                    n_expected += 1
                    if (position, token) in found:
                        ours.append(found[position, token] - float(expected[position][token]))
                        theirs.append(float(near[position][token] - expected[position][token]))
        assert len(ours) > (0.99 if noise == NOISE else 0.9) * n_expected, (
            "the likeliest tokens are not among those reported"
        )
        print(f"part {part}: {deviation(ours):.5f} of {deviation(theirs):.5f}, most {max(map(abs, ours)):.4f}")
        assert deviation(ours) <= noise * deviation(theirs)
        assert max(map(abs, ours)) <= 2 * noise * max(map(abs, theirs))
