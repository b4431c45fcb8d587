"""Mixtures of experts in the whole engine: the same bits every time, and graphs against eager steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpu_support import common_difference, engine_scores, greedy, opened, random_ids, save

from radixkv import LLM

MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 192,
}
NOISE = 0.3
"""Largest common difference of two runs whose products have other bits: some tokens go to other experts."""


def scores(llm: LLM, prompts: list[list[int]]) -> list[dict[tuple[int, int], float]]:
    """Returns the log-probabilities of answers from an empty cache."""
    llm.flush_cache()
    outputs = llm.generate(prompts, greedy(24, logprobs=5), use_tqdm=False)
    return [engine_scores(output)[1] for output in outputs]


@pytest.mark.parametrize("is_eager", [False, True])
def test_the_same_requests_have_the_same_bits_again(tmp_path: Path, is_eager: bool) -> None:
    prompts = [random_ids(n, seed=n) for n in (1, 40, 333, 700)]
    with opened(save(tmp_path, **MIXTURE), enforce_eager=is_eager) as llm:
        alone = [scores(llm, [prompt]) for prompt in prompts]
        assert [scores(llm, [prompt]) for prompt in prompts] == alone


def test_decode_graphs_give_what_eager_steps_give(tmp_path: Path) -> None:
    """A step of one row is not padded, and routes its token in the same launches."""
    folder, prompt = save(tmp_path, **MIXTURE), random_ids(1, seed=3)
    found = []
    for is_eager in (False, True):
        with opened(folder, enforce_eager=is_eager) as llm:
            found += scores(llm, [prompt])
    assert common_difference(*found) < NOISE
