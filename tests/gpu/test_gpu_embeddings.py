"""Embeddings and scores on CUDA against Transformers: both in 16 bits, measured by their distance from float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_support import DEVICE, SHAPE, opened, random_ids, save
from torch import Tensor
from transformers import AutoModelForCausalLM

from radixkv.generation.reranking import DEFAULT_INSTRUCTION, reranker_prompt
from support.small_tokenizers import with_yes_and_no

LENGTHS = (1, 7, 16, 33, 300, 1100)
NOISE = 2.0
"""Most times that our distance from float32 may be that of Transformers."""


def states(folder: Path, prompts: Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
    """Returns the last token's states after the last norm, with length 1 in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").to(DEVICE)
    with torch.inference_mode():
        found = [
            model.model(torch.tensor([list(ids)], device=DEVICE)).last_hidden_state[0, -1].float().cpu()
            for ids in prompts
        ]
    return torch.nn.functional.normalize(torch.stack(found), dim=-1)


def embed(folder: Path, calls: Sequence[Sequence[Sequence[int]]], **settings: Any) -> list[Tensor]:
    """Returns the embeddings of the prompts of each call, one call after the other."""
    with opened(folder, task="embed", **settings) as llm:
        outputs = [llm.embed(prompts, use_tqdm=False) for prompts in calls]
    return [torch.tensor([one.outputs.embedding for one in found]) for found in outputs]


@pytest.mark.parametrize(
    ("model_type", "dtype", "settings"),
    [
        ("qwen3", "bfloat16", {}),
        ("qwen3", "float16", {"enforce_eager": True}),
        ("qwen3", "bfloat16", {"attention_backend": "triton", "page_size": 32}),
        ("llama", "bfloat16", {"max_num_batched_tokens": 2048}),
    ],
)
def test_embeddings_are_as_near_to_float32_as_those_of_transformers(
    model_type: str, dtype: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """The second call is of hits, of which short ones would fit a decode graph."""
    folder = save(tmp_path, model_type=model_type)
    prompts = [random_ids(n, seed=n) for n in LENGTHS]
    prompts += [prompts[-1][:n] for n in (200, 201)]
    exact = states(folder, prompts, torch.float32)
    theirs = (states(folder, prompts, getattr(torch, dtype)) - exact).norm(dim=-1)
    settings = {"dtype": dtype, "max_num_batched_tokens": 512, **settings}
    for found in embed(folder, [prompts, prompts, prompts[:3]], **settings):
        assert found.isfinite().all()
        torch.testing.assert_close(found.norm(dim=-1), torch.ones(len(found)))
        ours = (found - exact[: len(found)]).norm(dim=-1)
        print(f"{ours.max():.5f} of {theirs.max():.5f}")
        assert ours.max() <= NOISE * theirs.max()
        assert ours.mean() <= NOISE * theirs.mean()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_embeddings_of_two_gpus_are_those_of_one(tmp_path: Path) -> None:
    folder = save(tmp_path, model_type="qwen3")
    prompts = [random_ids(n, seed=n) for n in LENGTHS]
    (one,) = embed(folder, [prompts], attention_backend="triton")
    (two,) = embed(folder, [prompts], attention_backend="triton", tensor_parallel_size=2)
    exact = states(folder, prompts, torch.float32)
    assert (two - exact).norm(dim=-1).max() <= NOISE * (one - exact).norm(dim=-1).max()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enforce_eager": True, "attention_backend": "triton"},
        pytest.param(
            {"tensor_parallel_size": 2, "attention_backend": "triton"},
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
        ),
    ],
)
def test_scores_are_as_near_to_float32_as_those_of_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = with_yes_and_no()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    folder = save(tmp_path, model_type="qwen3", vocab_size=tokenizer.get_vocab_size())
    documents = [f"Document {n} says that hens lay eggs. " * n for n in (1, 2, 5, 20)]
    prompts = [reranker_prompt("Who lays eggs?", one, DEFAULT_INSTRUCTION) for one in documents]
    ids = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
    answers = [tokenizer.token_to_id("no"), tokenizer.token_to_id("yes")]
    expected = []
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").to(DEVICE)
        with torch.inference_mode():
            logits = [model(torch.tensor([one], device=DEVICE)).logits[0, -1, answers].float().cpu() for one in ids]
        expected.append(torch.stack(logits).softmax(-1)[:, 1])
    exact, rounded = expected
    with opened(folder, task="score", max_num_batched_tokens=512, **settings) as llm:
        for _ in range(2):
            outputs = llm.score("Who lays eggs?", documents, use_tqdm=False)
            found = torch.tensor([one.outputs.score for one in outputs])
            print(f"{(found - exact).abs().max():.5f} of {(rounded - exact).abs().max():.5f}")
            assert [one.prompt_token_ids for one in outputs] == ids
            assert (found - exact).abs().max() <= max(0.02, 2 * NOISE * (rounded - exact).abs().max())
    assert outputs[0].num_cached_tokens > 0
    assert exact.max() - exact.min() > 0.05  # so that scores of other prompts would be noticed


def test_the_shape_of_these_checkpoints_is_that_of_the_embeddings(tmp_path: Path) -> None:
    (found,) = embed(save(tmp_path, model_type="qwen3"), [[random_ids(9, seed=1)]])
    assert found.shape == (1, SHAPE["hidden_size"])
