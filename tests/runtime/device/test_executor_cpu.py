import gc
import time
from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from radixkv.checkpoints import Checkpoint
from radixkv.errors import ConfigError, DeviceError
from radixkv.runtime.device.cpu import executor as executor_module
from radixkv.runtime.device.cpu.executor import CpuExecutor
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.step.plan import Row, StepPlan
from radixkv.runtime.step.result import SampledStep
from support.checkpoints import VOCAB
from support.device_support import GREEDY, logits_of, random_ids, row_of, tokens_of
from support.poison import poison

Get = Callable[[str], Checkpoint]
IDS = random_ids(20, seed=21)
TABLE = tuple(range(5, 13))


def open_executor(
    checkpoint: Checkpoint,
    *,
    page_size: int = 4,
    max_rows: int = 4,
    max_model_len: int = 200,
    kv_cache_memory_bytes: int = 1 << 30,
    max_total_tokens: int | None = 200,
) -> CpuExecutor:
    return CpuExecutor(
        checkpoint,
        DeviceSettings(
            page_size=page_size,
            max_num_seqs=max_rows,
            max_model_len=max_model_len,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            max_total_tokens=max_total_tokens,
            max_num_batched_tokens=2048,
        ),
    )


@pytest.fixture
def executor(checkpoint: Get) -> CpuExecutor:
    executor = open_executor(checkpoint("grouped"))
    poison(executor.pool, range(executor.n_pages))
    return executor


def prompt(batch_slot: int = 0, table: tuple[int, ...] = TABLE) -> Row:
    return row_of(IDS, table, batch_slot=batch_slot, sampling=GREEDY)


def decode(position: int, batch_slot: int = 0) -> Row:
    return Row(batch_slot, position, 1, None, position, 0, (), GREEDY)


def expected_tokens(checkpoint: Checkpoint, n: int) -> list[int]:
    """Returns greedy tokens, computed with one whole prefill per token."""
    ids = list(IDS)
    for _ in range(n):
        ids.append(int(logits_of(checkpoint, ids)[-1].argmax()))
    return ids[len(IDS) :]


def test_a_step_launched_before_a_result_continues_with_the_sampled_token(
    checkpoint: Get, executor: CpuExecutor
) -> None:
    plans = [prompt(), *(decode(len(IDS) + i) for i in range(5))]
    steps = [executor.launch(StepPlan(i, (row,))).sample(None) for i, row in enumerate(plans)]
    results = [step.result() for step in reversed(steps)][::-1]
    assert [result.tokens[0] for result in results] == expected_tokens(checkpoint("grouped"), 6)
    assert all(result.finite == (True,) for result in results)


def test_a_step_is_computed_when_its_result_is_requested(executor: CpuExecutor) -> None:
    step = executor.launch(StepPlan(0, (prompt(),))).sample(None)
    assert executor.pool.k[:, TABLE[0]].isnan().all()
    step.result()
    assert executor.pool.k[:, TABLE[0]].isfinite().all()


def test_the_time_of_a_step_contains_that_of_attention_in_all_layers(
    executor: CpuExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_s, run = 0.02, executor.attention.run
    layers: list[int] = []

    def slowed(layer: int, *arguments: Tensor) -> None:
        layers.append(layer)
        time.sleep(slow_s)
        run(layer, *arguments)

    monkeypatch.setattr(executor.attention, "run", slowed)
    for plan in (prompt(), decode(len(IDS))):
        layers.clear()
        begun = time.perf_counter()
        result = executor.launch(StepPlan(0, (plan,))).sample(None).result()
        elapsed_s = time.perf_counter() - begun
        assert len(layers) * slow_s <= result.device_seconds < elapsed_s
        assert len(layers) > 1


def test_a_row_updates_its_block_table(checkpoint: Get, executor: CpuExecutor) -> None:
    expected = expected_tokens(checkpoint("grouped"), 2)
    first = Row(1, 0, 8, tokens_of(IDS[:8]), 0, 0, (30, 31), None)
    rest = Row(1, 8, 12, tokens_of(IDS[8:]), 8, 2, (9, 20, 4), GREEDY)
    assert executor.launch(StepPlan(0, (first,))).sample(None).result().tokens == (-1,)
    assert executor.launch(StepPlan(1, (rest,))).sample(None).result().tokens == (expected[0],)
    executor.pool.k[:, 40] = executor.pool.k[:, 20]
    executor.pool.v[:, 40] = executor.pool.v[:, 20]
    poison(executor.pool, [20])
    moved = Row(1, 20, 1, None, 20, 3, (40, 4, 17), GREEDY)
    assert executor.launch(StepPlan(2, (moved,))).sample(None).result().tokens == (expected[1],)


def test_a_table_update_does_not_affect_steps_launched_before(executor: CpuExecutor) -> None:
    alone = executor.launch(StepPlan(0, (prompt(),))).sample(None).result()
    first = executor.launch(StepPlan(1, (prompt(),))).sample(None)
    other = row_of(random_ids(20, seed=22), (40, 41, 42, 43, 44), sampling=GREEDY)
    executor.launch(StepPlan(2, (other,))).sample(None).result()
    assert first.result().tokens == alone.tokens
    assert executor.pool.k[:, 40].isfinite().all()


def test_rows_of_each_kind_in_one_step(checkpoint: Get, executor: CpuExecutor) -> None:
    """One step with a greedy row, a sampled row, a partial prefill and a row that is not finite."""
    executor.launch(StepPlan(0, (prompt(0, (0, 1, 2, 3, 4, 5)), prompt(1, (6, 7, 8, 9, 10, 11))))).sample(
        None
    ).result()
    poison(executor.pool, [7])
    drawn = replace(GREEDY, temperature=1.0, seed=3, index=1)
    rows = (
        decode(20, batch_slot=0),
        decode(20, batch_slot=1),
        row_of(IDS, (12, 13, 14, 15, 16), batch_slot=2, stop=7),
        row_of(IDS, (17, 18, 19, 20, 21), batch_slot=3, sampling=drawn),
    )
    result = executor.launch(StepPlan(1, rows)).sample(None).result()
    assert result.tokens[0] == expected_tokens(checkpoint("grouped"), 2)[1]
    assert result.finite == (True, False, True, True)
    assert result.tokens[1:3] == (-1, -1)
    again = row_of(IDS, (17, 18, 19, 20, 21), batch_slot=3, sampling=drawn)
    assert executor.launch(StepPlan(2, (again,))).sample(None).result().tokens == result.tokens[3:]


def test_a_row_without_sampling_is_checked_for_finite_values(executor: CpuExecutor) -> None:
    executor.launch(StepPlan(0, (row_of(IDS, TABLE, stop=8),))).sample(None).result()
    poison(executor.pool, [TABLE[0]])
    result = executor.launch(StepPlan(1, (row_of(IDS, TABLE, start=8, stop=12),))).sample(None).result()
    assert result.finite == (False,)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_slot_whose_token_was_not_finite_can_continue(executor: CpuExecutor, temperature: float) -> None:
    """The next step is already launched when the failed row is reported."""
    executor.launch(StepPlan(0, (row_of(IDS, TABLE, stop=8),))).sample(None).result()
    poison(executor.pool, [TABLE[0]])
    sampling = replace(GREEDY, temperature=temperature)
    failed = executor.launch(StepPlan(1, (row_of(IDS, TABLE, start=8, sampling=sampling),))).sample(None)
    following = executor.launch(StepPlan(2, (decode(20), prompt(1, (20, 21, 22, 23, 24))))).sample(None)
    assert failed.result().finite == (False,)
    assert following.result().finite == (False, True)


def test_a_failure_fails_the_steps_already_launched_but_no_later_one(
    checkpoint: Get, executor: CpuExecutor
) -> None:
    broken = row_of([VOCAB, *IDS[1:]], TABLE, batch_slot=2, sampling=GREEDY)
    before = executor.launch(StepPlan(0, (prompt(0, (20, 21, 22, 23, 24)),))).sample(None)
    steps: list[SampledStep] = [
        executor.launch(StepPlan(1, (broken,))).sample(None),
        executor.launch(StepPlan(2, (decode(20, batch_slot=2),))).sample(None),
        executor.launch(StepPlan(3, (prompt(3, (30, 31, 32, 33, 34)),))).sample(None),
    ]
    with pytest.raises(DeviceError, match="step 3 depends on step 1"):
        steps[2].result()
    with pytest.raises(DeviceError, match="step 1 failed"):
        steps[0].result()
    with pytest.raises(DeviceError, match="step 2 depends on step 1"):
        steps[1].result()
    expected = tuple(expected_tokens(checkpoint("grouped"), 1))
    assert before.result().tokens == expected
    assert executor.launch(StepPlan(4, (prompt(),))).sample(None).result().tokens == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row(4, 0, 1, tokens_of([1]), 0, 0, (0,), None), "4 batch slots"),
        (Row(0, 0, 0, b"", 0, 0, (0,), None), "no tokens"),
        (Row(0, 0, 2, tokens_of([1]), 0, 0, (0,), None), "as many ids"),
        (Row(0, 0, 3, None, 0, 0, (0,), None), "as many ids"),
        (Row(0, 0, 1, tokens_of([1]), 0, 0, (50,), None), "pages .50. of a pool of 50"),
        (Row(0, 0, 1, tokens_of([1]), 0, 0, (-1,), None), "pages .-1."),
        (Row(0, 4, 1, tokens_of([1]), 0, 1, (0,), None), "a hole"),
        (Row(0, 0, 1, tokens_of([1]), 0, 49, (0, 1), None), "table entries beyond 50"),
        (Row(0, 200, 1, tokens_of([1]), 0, 0, (0,), None), "beyond max_model_len 200"),
    ],
)
def test_an_invalid_plan_is_not_launched(executor: CpuExecutor, row: Row, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        executor.launch(StepPlan(0, (prompt(1), row))).sample(None)
    with pytest.raises(DeviceError, match="0 rows"):
        executor.launch(StepPlan(0, ())).sample(None)
    with pytest.raises(DeviceError, match="two rows have batch slot 0"):
        executor.launch(StepPlan(0, (prompt(), prompt()))).sample(None)
    assert executor.launch(StepPlan(1, (prompt(),))).sample(None).result().finite == (True,)


def test_the_pool_is_sized_by_tokens_or_bytes(checkpoint: Get) -> None:
    assert open_executor(checkpoint("grouped"), max_total_tokens=203).n_pages == 50
    page_bytes = 2 * 3 * 2 * 4 * 16 * 4
    small = open_executor(checkpoint("grouped"), max_total_tokens=None, kv_cache_memory_bytes=7 * page_bytes + 1)
    assert small.n_pages == 7
    assert small.vocab_size == VOCAB


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_total_tokens": 3}, "max_total_tokens 3 is less than one page of 4"),
        (
            {"max_total_tokens": None, "kv_cache_memory_bytes": 100},
            "kv_cache_memory_bytes 100 is less than one page",
        ),
        ({"max_total_tokens": 1 << 50}, "does not fit into memory"),
        ({"page_size": 0}, "page_size 0"),
        ({"max_rows": 0}, "max_num_seqs 0"),
    ],
)
def test_invalid_sizes(checkpoint: Get, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_executor(checkpoint("grouped"), **settings)


def test_the_pool_is_zeroed_at_start(executor: CpuExecutor) -> None:
    assert executor.pool.k.shape == (3, 51, 2, 4, 16)
    assert torch.equal(executor.pool.k[:, executor.pool.zero_page], torch.zeros(3, 2, 4, 16))


def test_failed_steps_leave_no_tensors_without_the_cyclic_collector(
    executor: CpuExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def n_tensors() -> int:
        return sum(type(candidate) is torch.Tensor for candidate in gc.get_objects())

    def breaks(hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"no logits of {hidden.shape}")

    monkeypatch.setattr(executor.model, "logits", breaks)
    # pytest keeps log records, whose tracebacks refer to tensors
    monkeypatch.setattr(executor_module.logger, "disabled", True)
    gc.collect()
    gc.disable()
    try:
        counts = []
        for step in range(4):
            pending = executor.launch(StepPlan(step, (row_of([1, 2, 3], (0,), sampling=GREEDY),))).sample(None)
            with pytest.raises(DeviceError, match="no logits"):
                pending.result()
            del pending
            counts.append(n_tensors())
    finally:
        gc.enable()
    assert counts[-1] == counts[0]
