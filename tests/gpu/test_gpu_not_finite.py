"""NaN in unwritten or damaged pages does not spread to other requests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from gpu_drive import executor_of, record
from gpu_support import NEAR_TIE, check_same_answers, family, greedy, opened, random_ids

from radixkv import LLM, RequestOutput
from radixkv.runtime.device.memory.cuda.kv_pool import CudaPool
from support.poison import poison

N_NEW = 16


def check(alone: LLM, prompts: list[list[int]], *runs: list[RequestOutput]) -> None:
    """Compares answers with those of one request at a time without the prefix cache."""
    expected = [alone.generate([prompt], greedy(N_NEW, logprobs=20), use_tqdm=False)[0] for prompt in prompts]
    for run in runs:
        check_same_answers(expected, [output.outputs[0].token_ids for output in run], tolerance=NEAR_TIE)


def pool_of(llm: LLM) -> CudaPool:
    from radixkv.runtime.device.cuda.executor import CudaExecutor

    executor = executor_of(llm)
    assert isinstance(executor, CudaExecutor)
    return executor._runner.pool


def poison_between_steps(pool: CudaPool, pages: Iterable[int]) -> None:
    """Fills pages with NaN between steps, as it does not use the engine's stream."""
    torch.cuda.synchronize()
    with torch.inference_mode():
        poison(pool, pages)
    torch.cuda.synchronize()


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_unwritten_positions_are_never_read(sensitive_folder: Path, alone: LLM, page_size: int) -> None:
    """Covers chunked prompts, decode rows, padding, shared pages and hits: a weight of 0 would not remove NaN."""
    prompts = family(20, seed=1)
    with opened(sensitive_folder, page_size=page_size, max_num_batched_tokens=500) as llm:
        pool = pool_of(llm)
        poison_between_steps(pool, range(pool.n_pages))
        cold = llm.generate(prompts, greedy(N_NEW), use_tqdm=False)
        warm = llm.generate(prompts, greedy(N_NEW), use_tqdm=False)
    check(alone, prompts, cold, warm)


def test_a_page_with_nan_changes_no_answer(sensitive_folder: Path, alone: LLM) -> None:
    """Requests that hit the page are retried without the prefix cache; others are not affected."""
    stem = random_ids(160, seed=1)
    prompts = [stem + random_ids(5 + i, seed=10 + i) for i in range(6)]
    prompts += [random_ids(50 + 30 * i, seed=100 + i) for i in range(6)]
    with opened(sensitive_folder) as llm:
        pool, plans = pool_of(llm), record(llm)
        llm.generate([stem + random_ids(20, seed=2)], greedy(2), use_tqdm=False)
        poison_between_steps(pool, [plans[0].rows[0].table_pages[3]])
        outputs = llm.generate(prompts, greedy(N_NEW), use_tqdm=False)
        rows = [row for plan in plans for row in plan.rows]
        assert sum(row.start == 0 and row.n_tokens > len(stem) for row in rows) >= 1 + 6, "no prompt was retried"
    check(alone, prompts, outputs)
