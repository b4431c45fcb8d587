"""Comparison with the oracle, Hugging Face Transformers on the same checkpoint."""

from collections.abc import Callable

import pytest
import torch

from radixkv.checkpoints import Checkpoint
from radixkv.runtime.device.cpu.executor import CpuExecutor
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.step.plan import Row, StepPlan
from support.cases import nightly_but
from support.device_support import (
    CHECKPOINTS,
    GREEDY,
    OpenDevice,
    load_oracle,
    logits_of,
    random_ids,
    row_of,
    tokens_of,
)
from support.poison import poison

Get = Callable[[str], Checkpoint]
N_NEW = 64
PAGE = 8


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_teacher_forced_logits_are_within_1e_4(checkpoint: Get, name: str) -> None:
    ids = random_ids(330, seed=1)
    with torch.inference_mode():
        expected = load_oracle(checkpoint(name))(torch.tensor([ids])).logits[0]
    logits = logits_of(checkpoint(name), ids)
    assert expected.abs().max() > 1.0
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", nightly_but(CHECKPOINTS, "grouped", "gpt-oss"))
def test_greedy_tokens_alone_batched_chunked_and_with_hits(checkpoint: Get, name: str) -> None:
    """Three prompts prefilled in chunks and decoded together; the second shares pages with the first."""
    shared = random_ids(3 * PAGE, seed=2)
    prompts = [shared + random_ids(21, seed=3), shared + random_ids(30, seed=4), random_ids(11, seed=5)]
    oracle = load_oracle(checkpoint(name))
    executor = CpuExecutor(
        checkpoint(name),
        DeviceSettings(
            page_size=PAGE,
            max_num_seqs=4,
            max_model_len=256,
            kv_cache_memory_bytes=1 << 30,
            max_total_tokens=PAGE * 60,
            max_num_batched_tokens=2048,
        ),
    )
    poison(executor.pool, range(executor.n_pages))
    n_table = -(-(max(map(len, prompts)) + N_NEW) // PAGE)
    tables = [tuple(range(i * n_table, (i + 1) * n_table)) for i in range(3)]
    tables[1] = tables[0][:3] + tables[1][3:]

    def prefill(batch_slot: int, start: int, stop: int) -> Row:
        sampling = GREEDY if stop == len(prompts[batch_slot]) else None
        return row_of(
            prompts[batch_slot],
            tables[batch_slot],
            batch_slot=batch_slot,
            start=start,
            stop=stop,
            sampling=sampling,
        )

    plans = [
        (prefill(0, 0, 2 * PAGE),),
        (prefill(0, 2 * PAGE, len(prompts[0])), prefill(1, 3 * PAGE, len(prompts[1])), prefill(2, 0, 11)),
    ]
    for step in range(N_NEW - 1):
        plans.append(
            tuple(
                Row(batch_slot, len(prompts[batch_slot]) + step, 1, None, 0, 0, (), GREEDY)
                for batch_slot in range(3)
            )
        )
    results = [executor.launch(StepPlan(number, plan)).sample(None) for number, plan in enumerate(plans)]
    answers = list(zip(*(pending.result().tokens for pending in results[1:]), strict=True))
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = oracle(torch.tensor([prompt + list(answer)])).logits[0, len(prompt) - 1 : -1]
            top = logits.topk(2).values
            has_clear_winner = top[:, 0] - top[:, 1] > 2e-4
            assert has_clear_winner.sum() > N_NEW // 2
            assert torch.equal(logits.argmax(-1)[has_clear_winner], torch.tensor(answer)[has_clear_winner])


def test_wrong_positions_differ_from_the_oracle(checkpoint: Get) -> None:
    """Checks that the comparison above detects positions that are off by one."""
    ids = random_ids(60, seed=6)
    with torch.inference_mode():
        expected = load_oracle(checkpoint("grouped"))(torch.tensor([ids])).logits[0]
    device = OpenDevice(checkpoint("grouped"))
    row = Row(0, 1, 59, tokens_of(ids[1:]), 1, 0, device.pages(60), None)
    first = Row(0, 0, 1, tokens_of(ids[:1]), 0, 0, row.table_pages, None)
    device.run(first)
    right = device.run(row)[0]
    assert (right - expected[1:]).abs().max() < 1e-4
    wrong = device.run(row, shift=1)[0]
    assert (wrong - expected[1:]).abs().max() > 1e-2
