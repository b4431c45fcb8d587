"""Answers with a ``kv_budget`` on CUDA: the same pages go as on the CPU, and answers are those of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gpu_support import VOCAB, opened, random_ids

from radixkv import LLM, RequestOutput, SamplingParams
from support.checkpoints import save_checkpoint

PAGE_SIZE, BUDGET = 16, 96
PROMPTS = [random_ids(n, seed) for seed, n in enumerate((40, 150, 333, 700))]


def answers(llm: LLM, kv_budget: int, n_tokens: int = 80) -> list[RequestOutput]:
    sampling = SamplingParams(
        temperature=0.0, max_tokens=n_tokens, ignore_eos=True, logprobs=0, kv_budget=kv_budget
    )
    return llm.generate(PROMPTS, sampling, use_tqdm=False)


def logprobs(output: RequestOutput) -> list[float]:
    answer = output.outputs[0]
    assert answer.logprobs is not None
    return [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]


def n_equal(first: Sequence[int], second: Sequence[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_answers_are_those_of_the_cpu(tmp_path: Path, enforce_eager: bool, kv_cache_dtype: str) -> None:
    save_checkpoint(tmp_path, head_dim=64, hidden_size=256, vocab_size=VOCAB)
    limits = {"max_model_len": 1024, "max_total_tokens": 8192, "page_size": PAGE_SIZE, "speculative_config": "off"}
    with LLM(tmp_path, device="cpu", dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, **limits) as cpu:
        expected = answers(cpu, BUDGET)
    with opened(tmp_path, enforce_eager=enforce_eager, kv_cache_dtype=kv_cache_dtype, **limits) as llm:
        exact = answers(llm, 0)
        found = answers(llm, BUDGET)
        again = answers(llm, BUDGET)
        after = answers(llm, 0)
    lengths = []
    for one, other in zip(found, expected, strict=True):
        n = n_equal(one.outputs[0].token_ids, other.outputs[0].token_ids)
        lengths.append(n)
        assert one.kv_eviction is not None
        assert one.kv_eviction == other.kv_eviction
        assert logprobs(one)[:n] == pytest.approx(logprobs(other)[:n], abs=0.15)
    assert sum(lengths) >= 0.5 * 80 * len(PROMPTS), f"answers are the same for {lengths} tokens"
    assert [one.outputs[0].token_ids for one in again] == [one.outputs[0].token_ids for one in found]
    assert [one.outputs[0].token_ids for one in after] == [one.outputs[0].token_ids for one in exact]
    assert [one.outputs[0].token_ids for one in found] != [one.outputs[0].token_ids for one in exact]


def test_the_memory_of_freed_pages_is_used_again(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, head_dim=64, hidden_size=256, vocab_size=VOCAB)
    limits = {"max_model_len": 1024, "max_total_tokens": 1024, "page_size": PAGE_SIZE, "speculative_config": "off"}
    with opened(tmp_path, **limits) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True, kv_budget=64)
        outputs = llm.generate([random_ids(20, seed) for seed in range(8)], sampling, use_tqdm=False)
        stats = llm.get_metrics()
    assert all(len(output.outputs[0].token_ids) == 900 for output in outputs)
    assert stats.preemptions_total == 0, "eight answers of 900 tokens fit a pool of 1,024"
    assert torch.cuda.is_available()
