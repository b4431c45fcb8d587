"""Penalties, logprobs, prompt logprobs and page copies of a step on the CPU."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from radixkv.checkpoints import Checkpoint
from radixkv.errors import DeviceError
from radixkv.runtime.device.cpu.executor import CpuExecutor
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.step.plan import History, Row, RowSampling, Scoring, StepPlan
from radixkv.wire.messages import TokenLogprobs
from support.checkpoints import VOCAB
from support.device_support import GREEDY, logits_of, random_ids, row_of, tokens_of
from support.poison import poison

Get = Callable[[str], Checkpoint]
IDS = random_ids(20, seed=21)
TABLE = tuple(range(5, 13))
PENALISED = replace(GREEDY, frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.3)


@pytest.fixture
def executor(checkpoint: Get) -> CpuExecutor:
    executor = CpuExecutor(
        checkpoint("grouped"),
        DeviceSettings(
            page_size=4,
            max_num_seqs=4,
            max_model_len=700,
            kv_cache_memory_bytes=1 << 30,
            max_total_tokens=1000,
            max_num_batched_tokens=2048,
        ),
    )
    poison(executor.pool, range(executor.n_pages))
    return executor


def prompt(sampling: RowSampling = GREEDY, *, batch_slot: int = 0, scoring: Scoring | None = None) -> Row:
    return replace(row_of(IDS, TABLE, batch_slot=batch_slot, sampling=sampling), scoring=scoring)


def decode(position: int, sampling: RowSampling = GREEDY, batch_slot: int = 0) -> Row:
    return Row(batch_slot, position, 1, None, position, 0, (), sampling)


def check(got: TokenLogprobs, logits: Tensor, token: int, n: int) -> None:
    expected = logits.log_softmax(-1)
    assert got.logprob == pytest.approx(float(expected[token]), abs=1e-5)
    assert got.rank == 1 + int((logits > logits[token]).sum())
    assert np.frombuffer(got.top_ids, "<i4").tolist() == expected.topk(n).indices.tolist()
    assert np.frombuffer(got.top_logprobs, "<f4") == pytest.approx(expected.topk(n).values.numpy(), abs=1e-5)


def penalised_tokens(checkpoint: Checkpoint, n: int) -> list[int]:
    """Returns greedy tokens with penalties computed directly, with one whole prefill per token."""
    ids = list(IDS)
    for _ in range(n):
        logits = logits_of(checkpoint, ids)[-1].double()
        counts = Counter(ids[len(IDS) :])
        for token in set(ids):
            logits[token] *= 1.3 if logits[token] < 0 else 1 / 1.3
            logits[token] -= 1.0 * counts[token] + 0.5 * (token in counts)
        ids.append(int(logits.argmax()))
    return ids[len(IDS) :]


def test_penalties_count_tokens_of_steps_whose_results_are_pending(checkpoint: Get, executor: CpuExecutor) -> None:
    expected = penalised_tokens(checkpoint("grouped"), 7)
    rows = [prompt(replace(PENALISED, history=History(tokens_of(IDS), len(IDS))))]
    rows += [decode(len(IDS) + i, PENALISED) for i in range(6)]
    steps = [executor.launch(StepPlan(i, (row,))).sample(None) for i, row in enumerate(rows)]
    assert [step.result().tokens[0] for step in steps] == expected
    again = History(tokens_of(IDS + expected[:3]), len(IDS))
    retried = row_of(IDS + expected[:3], range(20, 30), batch_slot=2, sampling=replace(PENALISED, history=again))
    assert executor.launch(StepPlan(7, (retried,))).sample(None).result().tokens == (expected[3],)
    assert executor.launch(StepPlan(8, (decode(23, PENALISED, batch_slot=2),))).sample(None).result().tokens == (
        expected[4],
    )


def test_logprobs_of_sampled_tokens(checkpoint: Get, executor: CpuExecutor) -> None:
    drawn = replace(GREEDY, temperature=5.0, seed=4, n_logprobs=3, logit_bias=((7, 3.0),))
    rows = (prompt(drawn), row_of(IDS, range(20, 25), batch_slot=1, sampling=GREEDY), partial_prompt(batch_slot=2))
    result = executor.launch(StepPlan(0, rows)).sample(None).result()
    assert result.logprobs[1:] == (None, None)
    assert result.logprobs[0] is not None
    check(result.logprobs[0], logits_of(checkpoint("grouped"), IDS)[-1], result.tokens[0], 3)
    assert executor.launch(StepPlan(1, (decode(20),))).sample(None).result().logprobs == ()


def partial_prompt(batch_slot: int) -> Row:
    return row_of(IDS, range(30, 35), batch_slot=batch_slot, stop=7)


@pytest.mark.parametrize("chunks", [[(0, 20)], [(0, 8), (8, 20)], [(0, 19), (19, 20)]])
def test_prompt_logprobs(checkpoint: Get, executor: CpuExecutor, chunks: list[tuple[int, int]]) -> None:
    logits = logits_of(checkpoint("grouped"), IDS)
    logprobs: list[TokenLogprobs] = []
    for step, (start, stop) in enumerate(chunks):
        row = row_of(IDS, TABLE, start=start, stop=stop, sampling=GREEDY if stop == len(IDS) else None)
        with_logprobs = replace(row, scoring=Scoring(tokens_of(IDS[start + 1 : stop + 1]), 2))
        result = (
            executor.launch(StepPlan(step, (row_of([1], (60,), batch_slot=1), with_logprobs))).sample(None).result()
        )
        assert result.finite == (True, True)
        assert result.prompt_logprobs[0] is None
        assert result.prompt_logprobs[1] is not None
        logprobs += result.prompt_logprobs[1]
    assert result.tokens == (-1, int(logits[-1].argmax()))
    assert len(logprobs) == len(IDS) - 1
    for index, logprobs_of_token in enumerate(logprobs):
        check(logprobs_of_token, logits[index], IDS[index + 1], 2)
    assert executor.launch(StepPlan(9, (prompt(),))).sample(None).result().prompt_logprobs == ()


def test_prompt_logprobs_of_a_long_prompt_are_computed_in_chunks(
    checkpoint: Get, executor: CpuExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, sizes, head = random_ids(600, seed=5), [], executor.model.logits

    def counted(hidden: Tensor) -> Tensor:
        sizes.append(len(hidden))
        return head(hidden)

    monkeypatch.setattr(executor.model, "logits", counted)
    row = replace(row_of(ids, range(150)), scoring=Scoring(tokens_of(ids[1:]), 0))
    (logprobs,) = executor.launch(StepPlan(0, (row,))).sample(None).result().prompt_logprobs
    assert sizes == [256, 256, 87]
    assert logprobs is not None
    expected = logits_of(checkpoint("grouped"), ids)[:-1].log_softmax(-1)
    got = torch.tensor([logprobs_of_token.logprob for logprobs_of_token in logprobs])
    assert torch.allclose(got, expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0], atol=1e-4)


def test_a_row_whose_prompt_logprobs_are_not_finite(executor: CpuExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    head = executor.model.logits

    def breaks(hidden: Tensor) -> Tensor:
        logits = head(hidden)
        if len(hidden) == len(IDS) - 1:
            logits[3, 5] = torch.nan
        return logits

    scoring = Scoring(tokens_of(IDS[1:]), 1)
    requested = replace(GREEDY, n_logprobs=1)
    other = replace(
        row_of(IDS[:9], range(20, 23), batch_slot=1, sampling=requested), scoring=Scoring(tokens_of(IDS[1:9]), 1)
    )
    expected = executor.launch(StepPlan(0, (other,))).sample(None).result()
    monkeypatch.setattr(executor.model, "logits", breaks)
    result = executor.launch(StepPlan(1, (prompt(requested, scoring=scoring), other))).sample(None).result()
    assert result.finite == (False, True)
    assert result.tokens == (-1, *expected.tokens)
    assert result.logprobs == (None, *expected.logprobs)
    assert result.prompt_logprobs == (None, *expected.prompt_logprobs)


def test_pages_are_copied_before_anything_is_written(executor: CpuExecutor) -> None:
    """A fork after 18 tokens: batch slot 0 continues in the partial page, batch slot 1 in its copy."""
    executor.launch(StepPlan(0, (row_of(IDS, TABLE, stop=18),))).sample(None).result()
    fork = (*TABLE[:4], 60)
    alone = row_of([*IDS[:18], 77], (70, 71, 72, 73, 74), batch_slot=3, sampling=GREEDY)
    expected = executor.launch(StepPlan(1, (alone,))).sample(None).result()
    rows = (
        row_of(IDS, TABLE, start=18, sampling=GREEDY),
        row_of([*IDS[:18], 77], fork, batch_slot=1, start=18, sampling=GREEDY),
    )
    got = executor.launch(StepPlan(2, rows, copies=((TABLE[4], 60), (TABLE[0], 61)))).sample(None).result()
    assert got.finite == (True, True)
    assert got.tokens[1:] == expected.tokens
    for cache in (executor.pool.k, executor.pool.v):
        assert torch.equal(cache[:, 60, :, :2], cache[:, TABLE[4], :, :2])
        assert torch.equal(cache[:, 60, :, 2], cache[:, 74, :, 2])
        assert not torch.equal(cache[:, 60, :, 2], cache[:, TABLE[4], :, 2])
        assert cache[:, 60, :, 3].isnan().all()
        assert torch.equal(cache[:, 61], cache[:, TABLE[0]])


HISTORY = History(tokens_of(IDS), 3)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (prompt(scoring=Scoring(tokens_of(IDS[2:]), 1)), "prompt logprobs of 18 tokens .* 20"),
        (prompt(scoring=Scoring(tokens_of([*IDS, 1]), 1)), "prompt logprobs of 21 tokens .* 20"),
        (prompt(scoring=Scoring(tokens_of(IDS[1:]), -1)), "n_logprobs -1"),
    ],
)
def test_invalid_rows_are_refused(executor: CpuExecutor, row: Row, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        executor.launch(StepPlan(0, (row,))).sample(None)
    assert executor.launch(StepPlan(1, (prompt(),))).sample(None).result().finite == (True,)


def test_penalties_without_a_history_fail_the_step(executor: CpuExecutor) -> None:
    with pytest.raises(DeviceError, match="slot 0 has penalties and no history"):
        executor.launch(StepPlan(0, (prompt(PENALISED),))).sample(None).result()
    assert executor.launch(StepPlan(1, (prompt(),))).sample(None).result().finite == (True,)


def test_a_new_request_in_a_batch_slot_drops_the_history(executor: CpuExecutor) -> None:
    executor.launch(StepPlan(0, (prompt(replace(PENALISED, history=HISTORY)),))).sample(None)
    executor.launch(StepPlan(1, (partial_prompt(batch_slot=0),))).sample(None)
    executor.launch(StepPlan(2, (prompt(PENALISED),))).sample(None).result()
    executor.launch(StepPlan(3, (prompt(),))).sample(None)
    with pytest.raises(DeviceError, match="has penalties and no history"):
        executor.launch(StepPlan(4, (prompt(PENALISED),))).sample(None).result()


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        (((0, 250),), "copies pages 0 to 250 of a pool of 250"),
        (((-1, 3),), "copies pages -1 to 3"),
        (((1, 3), (2, 3)), "step 0 copies .* same destination"),
    ],
)
def test_invalid_copies_are_refused(
    executor: CpuExecutor, copies: tuple[tuple[int, int], ...], message: str
) -> None:
    with pytest.raises(DeviceError, match=message):
        executor.launch(StepPlan(0, (prompt(),), copies)).sample(None)


def test_token_ids_outside_the_vocabulary_fail_the_step(executor: CpuExecutor) -> None:
    banned = executor.launch(StepPlan(0, (prompt(replace(GREEDY, banned=(VOCAB,))),))).sample(None)
    with pytest.raises(DeviceError, match=f"not all between 0 and {VOCAB - 1}"):
        banned.result()
    with_logprobs = executor.launch(StepPlan(1, (prompt(scoring=Scoring(tokens_of([VOCAB] * 20), 1)),))).sample(
        None
    )
    with pytest.raises(DeviceError, match=f"prompt logprobs .* {VOCAB - 1}"):
        with_logprobs.result()
    assert executor.launch(StepPlan(2, (prompt(),))).sample(None).result().finite == (True,)
