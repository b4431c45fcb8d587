"""Answers with a ``kv_budget`` on CUDA: scores of pages, and answers from which the CPU's pages have gone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from zlib import crc32

import pytest
import torch
from gpu_support import NEAR_TIE, VOCAB, opened, random_ids, save_sensitive

from radixkv import LLM, RequestOutput, SamplingParams
from radixkv.runtime.device.memory.page_scores import PageScores
from radixkv.runtime.device.memory.page_shape import PageLayout, PageShape
from radixkv.runtime.paged_eviction import branch
from radixkv.runtime.paged_eviction.eviction import PagedEviction
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


def check_alike(ones: Sequence[RequestOutput], others: Sequence[RequestOutput]) -> None:
    """Compares scores as long as tokens are the same: of near ties either may be taken, so that is not for long."""
    lengths = []
    for one, other in zip(ones, others, strict=True):
        n = n_equal(one.outputs[0].token_ids, other.outputs[0].token_ids)
        lengths.append(n)
        assert logprobs(one)[:n] == pytest.approx(logprobs(other)[:n], abs=NEAR_TIE)
    # The first token is of the whole prompt. The first prompt is shorter than the budget.
    assert sum(lengths[1:]) >= 9, f"answers are the same for {lengths} tokens"


def by_entry(entry: int, score: float) -> float:
    """Ranks pages in an order of its own: the scores of random weights differ by less than 16 bits tell apart."""
    return crc32(entry.to_bytes(4, "little"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_scores_are_those_of_float64(dtype: torch.dtype) -> None:
    shape = PageShape(n_layers=3, n_kv_heads=4, page_size=PAGE_SIZE, head_dim=64, dtype=dtype)
    k, v = (torch.randn(3, 40, PAGE_SIZE, 4, 64, device="cuda").to(dtype) for _ in range(2))
    pages = torch.tensor([7, 0, 39, 12], device="cuda")
    found = PageScores([(k, v)], PageLayout.uniform(shape)).of(pages)
    norms = [values.double()[:, pages].square().sum(-1).sqrt() for values in (v, k)]
    expected = (norms[0] / norms[1]).mean((0, 2, 3))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_answers_are_those_of_the_cpu(
    tmp_path: Path, enforce_eager: bool, kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branch, "PagedEviction", partial(PagedEviction, rank=by_entry))
    save_sensitive(tmp_path)
    limits = {"max_model_len": 1024, "max_total_tokens": 8192, "page_size": PAGE_SIZE, "speculative_config": "off"}
    with LLM(tmp_path, device="cpu", dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, **limits) as cpu:
        expected = answers(cpu, BUDGET)
    with opened(tmp_path, enforce_eager=enforce_eager, kv_cache_dtype=kv_cache_dtype, **limits) as llm:
        answers(llm, 0, n_tokens=1)  # the others find the prompts in the cache
        exact = answers(llm, 0)
        found = answers(llm, BUDGET)
        again = answers(llm, BUDGET)
        after = answers(llm, 0)
    for one, other in zip(found, expected, strict=True):
        assert one.kv_eviction is not None
        assert one.kv_eviction == other.kv_eviction
    for ones, others in ((found, expected), (again, found), (after, exact)):
        check_alike(ones, others)
    assert [one.outputs[0].token_ids for one in found] != [one.outputs[0].token_ids for one in exact]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_preempted_answers_go_on_without_the_same_pages(
    tmp_path: Path, enforce_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are computed again in rows of several tokens behind pages that have gone."""
    monkeypatch.setattr(branch, "PagedEviction", partial(PagedEviction, rank=by_entry))
    save_sensitive(tmp_path)
    limits = {"max_model_len": 512, "page_size": PAGE_SIZE, "speculative_config": "off"}
    prompts = [random_ids(n, n) for n in (40, 90, 150, 60, 100, 33)]
    sampling = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True, logprobs=0, kv_budget=BUDGET)
    with LLM(tmp_path, device="cpu", dtype="bfloat16", max_total_tokens=8192, **limits) as cpu:
        expected = cpu.generate(prompts, sampling, use_tqdm=False)
    with opened(tmp_path, enforce_eager=enforce_eager, max_total_tokens=640, **limits) as llm:
        found = llm.generate(prompts, sampling, use_tqdm=False)
        n_preemptions = llm.get_metrics().preemptions_total
    assert n_preemptions > 0
    check_alike(found, expected)


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
