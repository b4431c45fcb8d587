"""Gemma 4 on several ranks, whose layers have different numbers of KV heads, and read those of others.

Pages come back from host memory and from disk with the bits of cold prompts, in the parts of all ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radixkv import LLM, RequestOutput, SamplingParams
from radixkv.errors import ConfigError
from support.checkpoints import save_checkpoint
from support.cold_answers import MODELS
from support.device_support import random_ids

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, ignore_eos=True)
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 512, "load_policy": "always"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With 2 KV heads in layers with a window, and 1 in others; 4 ranks have 2 different parts of a page."""
    folder = tmp_path_factory.mktemp("gemma")
    save_checkpoint(folder, **MODELS["heads of two shapes"])
    return folder


def answers(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    return [llm.generate([{"prompt_token_ids": one}], PARAMS, use_tqdm=False)[0] for one in prompts]


def scores(output: RequestOutput) -> list[dict[int, float]]:
    (answer,) = output.outputs
    assert answer.logprobs is not None
    return [{token: one.logprob for token, one in position.items()} for position in answer.logprobs]


@pytest.mark.nightly
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_pages_of_ranks_come_back_from_host_memory_and_after_a_restart_from_disk(
    folder: Path, n_ranks: int, tmp_path: Path
) -> None:
    prompts = [[*random_ids(100, seed=1), *random_ids(50 + n, seed=10 + n)] for n in range(2)]
    others = [random_ids(200, seed=30 + n) for n in range(4)]
    ranks = {"tensor_parallel_size": n_ranks, **SETTINGS}
    tiers = {"host_memory_bytes": 16 << 20, "cache_dir": str(tmp_path), "max_total_tokens": 640}
    with LLM(folder, **ranks, **tiers) as llm:
        cold = answers(llm, prompts)
        answers(llm, others)
        warm = answers(llm, prompts)
        host = llm.get_metrics().host
    with LLM(folder, **ranks, **tiers) as llm:
        again = answers(llm, prompts)
    assert not any(one.num_loaded_tokens or one.num_fetched_tokens for one in cold)
    for found in (warm, again):
        assert [scores(one) for one in found] == [scores(one) for one in cold]
    assert sum(one.num_loaded_tokens or 0 for one in warm) >= 144
    assert sum(one.num_fetched_tokens or 0 for one in again) >= 144
    assert host is not None
    assert host.copies_failed_total == 0


def test_numbers_of_ranks_that_do_not_divide_the_heads_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size 3 does not divide num_attention_heads, 4"):
        LLM(folder, device="cpu", tensor_parallel_size=3)
