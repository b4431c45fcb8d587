"""The whole engine on CUDA: answers do not depend on other requests, the prefix cache, or chunks of prompts.

The oracle is the same engine with one request at a time and no prefix cache, which ``test_gpu_models`` compares
with Transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_drive import loop_of, record
from gpu_support import (
    NEAR_TIE,
    check_same_answers,
    common_difference,
    engine_scores,
    family,
    greedy,
    needs_flashinfer,
    opened,
    random_ids,
)

from radixkv import LLM, RequestOutput, SamplingParams

N_NEW = 16
FP8_NEAR_TIE = 2 * NEAR_TIE
"""Where bf16's noise moves a value of K or V from one of 8 bits to the next, it becomes 16 times as large."""


def by_itself(alone: LLM, prompts: list[list[int]], n_new: int = N_NEW) -> list[RequestOutput]:
    """Returns each prompt's answer, computed one after another."""
    return [alone.generate([prompt], greedy(n_new, logprobs=20), use_tqdm=False)[0] for prompt in prompts]


def together(llm: LLM, prompts: list[list[int]], n_new: int = N_NEW) -> list[list[int]]:
    answers = llm.generate(prompts, greedy(n_new), use_tqdm=False)
    return [answer.outputs[0].token_ids for answer in answers]


def test_a_wrong_prompt_would_be_seen(alone: LLM) -> None:
    """Checks the comparison that all tests here use: it must fail when one page of the prompt is changed."""
    prompts = [random_ids(500, seed) for seed in range(12)]
    changed = [prompt[:64] + random_ids(16, 99) + prompt[80:] for prompt in prompts]
    others = [answer.outputs[0].token_ids for answer in by_itself(alone, changed)]
    with pytest.raises(AssertionError):
        check_same_answers(by_itself(alone, prompts), others, tolerance=NEAR_TIE)


def test_ragged_requests_with_shared_prefixes(sensitive_folder: Path, alone: LLM) -> None:
    prompts = family(60, seed=1)
    with opened(sensitive_folder) as llm:
        cold = together(llm, prompts)
        hits = llm.get_metrics().prefix_hits_total
        warm = together(llm, prompts)
        assert 0 < hits < llm.get_metrics().prefix_hits_total - hits
    expected = by_itself(alone, prompts)
    check_same_answers(expected, cold, tolerance=NEAR_TIE)
    check_same_answers(expected, warm, tolerance=NEAR_TIE)


def test_prompts_that_leave_a_cached_one_within_a_page(sensitive_folder: Path, alone: LLM) -> None:
    cached = random_ids(500, seed=3)
    prompts = [cached[:n] + random_ids(1 + n % 40, seed=n) for n in range(300, 348)]
    with opened(sensitive_folder) as llm:
        together(llm, [cached])
        plans = record(llm)
        answers = together(llm, prompts)
        assert sum(len(plan.copies) for plan in plans) >= 30, "few prompts copy a part of a page"
        assert llm.get_metrics().cache_use.n_copied >= 4 * 30
    check_same_answers(by_itself(alone, prompts), answers, tolerance=NEAR_TIE)


@pytest.mark.parametrize("budget", [96, 250, 8192])
def test_prompts_in_chunks(sensitive_folder: Path, alone: LLM, budget: int) -> None:
    prompts = [random_ids(n, seed=n) for n in (2900, 1, 1500, 700, 33)]
    with opened(sensitive_folder, max_num_seqs=64, max_num_batched_tokens=budget) as llm:
        chunked = together(llm, prompts)
    check_same_answers(by_itself(alone, prompts), chunked, tolerance=NEAR_TIE)


def test_a_thousand_rows(sensitive_folder: Path, alone: LLM) -> None:
    stems = [random_ids(n, seed=n) for n in (48, 100, 160)]
    prompts = [stems[i % 3] + random_ids(1 + i % 40, seed=1000 + i) for i in range(1100)]
    with opened(sensitive_folder, max_num_seqs=1024, max_num_batched_tokens=8192, max_total_tokens=1 << 18) as llm:
        plans = record(llm)
        answers = together(llm, prompts)
        assert max(len(plan.rows) for plan in plans) == 1024
    some = range(0, len(prompts), 25)
    check_same_answers(by_itself(alone, [prompts[i] for i in some]), [answers[i] for i in some], tolerance=NEAR_TIE)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_prompts_by_the_triton_kernel(
    sensitive_folder: Path, alone: LLM, enforce_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole prompts, cached ones and chunks, on a machine without FlashInfer."""
    prompts = family(60, seed=1)
    settings: dict[str, Any] = {"attention_backend": "triton", "max_num_batched_tokens": 250}
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", None)
        with opened(sensitive_folder, enforce_eager=enforce_eager, **settings) as llm:
            cold, warm = together(llm, prompts), together(llm, prompts)
    expected = by_itself(alone, prompts)
    check_same_answers(expected, cold, tolerance=NEAR_TIE)
    check_same_answers(expected, warm, tolerance=NEAR_TIE)


def test_answers_over_k_and_v_of_8_bits(sensitive_folder: Path) -> None:
    """Cached, computed anew and one at a time; the oracle has the same KV, so that only sums differ."""
    prompts = family(60, seed=1)
    with opened(sensitive_folder, kv_cache_dtype="fp8", max_num_seqs=1, enable_prefix_caching=False) as alone:
        expected = by_itself(alone, prompts)
    with opened(sensitive_folder, kv_cache_dtype="fp8") as llm:
        cold = together(llm, prompts)
        hits = llm.get_metrics().prefix_hits_total
        warm = together(llm, prompts)
        assert 0 < hits < llm.get_metrics().prefix_hits_total - hits
    check_same_answers(expected, cold, tolerance=FP8_NEAR_TIE)
    check_same_answers(expected, warm, tolerance=FP8_NEAR_TIE)


def test_a_long_row_among_short_ones(sensitive_folder: Path, alone: LLM) -> None:
    prompts = [random_ids(3900, seed=7), *(random_ids(20 + i, seed=i) for i in range(63))]
    with opened(sensitive_folder) as llm:
        answers = together(llm, prompts)
    check_same_answers(by_itself(alone, prompts), answers, tolerance=NEAR_TIE)


def test_shared_runs_do_not_change_answers(sensitive_folder: Path, alone: LLM) -> None:
    """Runs the same requests with and without shared runs in the plans; some runs are long, some nested."""
    system = random_ids(1024, seed=1)
    tools = [system + random_ids(512, seed=2 + i) for i in range(4)]
    prompts = [tools[i % 4] + random_ids(10 + i, seed=10 + i) for i in range(64)]
    prompts += [system + random_ids(100 + i, seed=200 + i) for i in range(16)]
    prompts += [random_ids(300, seed=300 + i) for i in range(8)]
    with opened(sensitive_folder, max_num_seqs=128, max_total_tokens=1 << 16) as llm:
        plans = record(llm)
        shared = llm.generate(prompts, greedy(N_NEW, logprobs=20), use_tqdm=False)
        runs = [run for plan in plans for run in plan.shared_runs]
        assert any(len(run.rows) >= 64 for run in runs), "no plan has shared runs of 64 rows"
        loop_of(llm).scheduler._shared_prefixes = None
        llm.flush_cache()
        plans.clear()
        flat = llm.generate(prompts, greedy(N_NEW, logprobs=20), use_tqdm=False)
        assert not any(plan.shared_runs for plan in plans)
    check_same_answers(flat, [output.outputs[0].token_ids for output in shared], tolerance=NEAR_TIE)
    check_same_answers(
        by_itself(alone, prompts[::4]), [output.outputs[0].token_ids for output in shared[::4]], tolerance=NEAR_TIE
    )


@pytest.mark.parametrize("is_large", [False, pytest.param(True, marks=needs_flashinfer)])
def test_shared_pages_in_tiles_of_either_size(
    sensitive_folder: Path, alone: LLM, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forces one tile size, for few rows and short runs that the cost model would not share."""
    sharing = pytest.importorskip("radixkv.runtime.device.attention.cuda.run_selection")
    monkeypatch.setattr(
        sharing.SharingCosts, "saved_ns", lambda *arguments: 1e9 if arguments[-1] is is_large else -1.0
    )
    sharing_plans = []
    select = sharing.SharedRunSelector.select

    def recorded_select(*arguments: object) -> object:
        sharing_plans.append(select(*arguments))
        return sharing_plans[-1]

    monkeypatch.setattr(sharing.SharedRunSelector, "select", recorded_select)
    stems = [random_ids(n, seed=n) for n in (160, 512)]
    prompts = [stems[i % 2] + random_ids(1 + i, seed=10 + i) for i in range(63)]
    with opened(sensitive_folder) as llm:
        answers = together(llm, prompts)
    runs = [run for each in sharing_plans if each is not None for run in each.runs]
    assert {run.is_large for run in runs} == {is_large}
    assert max(run.n_rows for run in runs) >= 31
    check_same_answers(by_itself(alone, prompts), answers, tolerance=NEAR_TIE)


def test_choices_fork_from_one_prompt(sensitive_folder: Path, alone: LLM) -> None:
    prompts = family(12, seed=5)
    with opened(sensitive_folder) as llm:
        greedy_choices = llm.generate(prompts, greedy(N_NEW, n=4), use_tqdm=False)
        drawn = llm.generate(prompts, SamplingParams(n=3, max_tokens=8, ignore_eos=True, seed=1), use_tqdm=False)
    expected = by_itself(alone, prompts)
    for choice in range(4):
        others = [answer.outputs[choice].token_ids for answer in greedy_choices]
        check_same_answers(expected, others, tolerance=NEAR_TIE)
    for answer in drawn:
        assert len({tuple(output.token_ids) for output in answer.outputs}) == 3


def test_a_hit_differs_from_a_miss_no_more_than_other_chunks_do(sensitive_folder: Path) -> None:
    """Compares a hit's difference with the noise of another summation order."""
    stems = [random_ids(16 * n, seed=n) for n in (10, 31, 64, 100)]
    prompts = [stem + random_ids(5 + 9 * i, seed=50 + i) for i, stem in enumerate(stems * 8)]
    sampling = greedy(1, logprobs=20)
    with opened(sensitive_folder, max_num_seqs=1, enable_prefix_caching=False, max_num_batched_tokens=2048) as llm:
        miss = llm.generate(prompts, sampling, use_tqdm=False)
    with opened(sensitive_folder, max_num_seqs=1, enable_prefix_caching=False, max_num_batched_tokens=208) as llm:
        other_chunks = llm.generate(prompts, sampling, use_tqdm=False)
    with opened(sensitive_folder, max_num_seqs=1, max_num_batched_tokens=2048) as llm:
        llm.generate(stems, greedy(1), use_tqdm=False)
        hit = llm.generate(prompts, sampling, use_tqdm=False)
    assert all(16 * 10 <= output.num_cached_tokens < len(output.prompt_token_ids) for output in hit)
    assert not any(output.num_cached_tokens for output in (*miss, *other_chunks))

    def apart(one: list[RequestOutput], other: list[RequestOutput]) -> float:
        pairs = zip(one, other, strict=True)
        return sum(common_difference(engine_scores(a)[1], engine_scores(b)[1]) for a, b in pairs) / len(one)

    noise, difference = apart(miss, other_chunks), apart(miss, hit)
    print(f"miss and miss {noise:.4f}, miss and hit {difference:.4f}")
    assert difference <= 1.5 * noise + 0.005
