"""Results of a step on the GPU, from the arrays that it sends to the host."""

from __future__ import annotations

from dataclasses import replace as replace_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from radixkv.runtime.device.cuda.model_runner import StepOutputs
from radixkv.runtime.device.cuda.pooled_rows import PooledRows
from radixkv.runtime.device.cuda.results import step_result
from radixkv.runtime.device.pack import PackedStep, RowArrays
from radixkv.runtime.request import GREEDY
from radixkv.runtime.step.plan import Row, RowSampling, Scoring, StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.wire.messages import Pooling, TokenLogprobs

FIRST, SECOND, THIRD = (TokenLogprobs(-float(rank), rank, b"", b"") for rank in (1, 2, 3))
PADDING = [77, 78]


def row(sampling: RowSampling | None = GREEDY, n_drafts: int = 0, n_targets: int = 0) -> Row:
    scoring = Scoring(bytes(4 * n_targets), 0) if n_targets else None
    return replace(Row(0, 8, 1 + n_drafts, None, 8, 0, (), sampling), n_drafts=n_drafts, scoring=scoring)


def result_of(rows: list[Row], finite: list[int], **computed: Any) -> StepResult:
    """Returns the result of these rows; the tokens of their sampled positions are 10, 11, 12, ..."""
    n_drafts = sum(row.n_drafts for row in rows)
    plan = StepPlan(step=1, rows=tuple(rows), n_decode=len(rows), n_drafts=n_drafts)
    sampled = np.array([[*range(10, 10 + len(finite)), *PADDING], [*finite, 0, 0]], np.int32)
    options = {"logprobs": {}, "prompt_logprobs": [], "device_seconds": 0.5} | computed
    return step_result(plan, sampled, **options)


@pytest.mark.parametrize(
    ("rows", "finite", "tokens", "are_finite"),
    [
        ([row(), row()], [1, 1], (10, 11), (True, True)),
        ([row(), row(None)], [1, 1], (10, -1), (True, True)),
        ([row(None)], [1], (-1,), (True,)),
        ([row(), row(), row(None)], [1, 0, 1], (10, -1, -1), (True, False, True)),
        ([row(n_drafts=2), row()], [1] * 4, (10, 11, 12, 13), (True, True)),
        ([row(n_drafts=2), row(None), row()], [1] * 5, (10, 11, 12, -1, 14), (True, True, True)),
        ([row(), row(n_drafts=2), row()], [1, 1, 0, 1, 1], (10, -1, -1, -1, 14), (True, False, True)),
        ([row(), row(n_drafts=1), row(None)], [0, 1, 1, 1], (-1, 11, 12, -1), (False, True, True)),
    ],
)
def test_a_row_has_tokens_if_it_samples_some_and_is_finite(
    rows: list[Row], finite: list[int], tokens: tuple[int, ...], are_finite: tuple[bool, ...]
) -> None:
    assert result_of(rows, finite) == StepResult(tokens, are_finite, (), (), 0.5)


@pytest.mark.parametrize(
    ("rows", "finite", "logprobs"),
    [
        ([row(n_drafts=1), row(), row()], [1, 1, 1, 1], (FIRST, SECOND, None, THIRD)),
        ([row(n_drafts=1), row(None), row()], [1, 1, 1, 1], (FIRST, SECOND, None, THIRD)),
        ([row(n_drafts=1), row(), row()], [1, 0, 1, 1], (None, None, None, THIRD)),
        ([row(), row(), row(), row()], [1, 0, 1, 1], (FIRST, None, None, THIRD)),
    ],
)
def test_logprobs_are_those_of_positions_of_finite_rows(
    rows: list[Row], finite: list[int], logprobs: tuple[TokenLogprobs | None, ...]
) -> None:
    assert result_of(rows, finite, logprobs={0: FIRST, 1: SECOND, 3: THIRD}).logprobs == logprobs


@pytest.mark.parametrize("n_drafts", [0, 2])
def test_prompt_logprobs_are_joined_by_row(n_drafts: int) -> None:
    rows = [row(n_drafts=n_drafts), row(None, n_targets=2), row(n_targets=2), row(n_targets=1)]
    chunks = [(1, [FIRST]), (1, [SECOND]), (2, [FIRST]), (2, None), (3, [THIRD])]
    result = result_of(rows, [1] * (3 + n_drafts) + [0], prompt_logprobs=chunks)
    assert result.prompt_logprobs == (None, (FIRST, SECOND), None, None)
    assert result.finite == (True, True, False, False)
    assert result.tokens == (*range(10, 11 + n_drafts), -1, -1, -1)


def test_prompt_logprobs_of_rows_that_all_sample_are_in_the_result() -> None:
    result = result_of([row(), row(n_targets=2)], [1, 1], prompt_logprobs=[(1, [FIRST, SECOND])])
    assert result == StepResult((10, 11), (True, True), (), (None, (FIRST, SECOND)), 0.5)


@pytest.mark.parametrize("is_split", [False, True])
def test_rows_report_their_last_states_and_logits(is_split: bool) -> None:
    """Rows that are split have several places; the last of them is the row's."""
    rows = [row(), replace(row(None), pooling=Pooling()), replace(row(None), pooling=Pooling((5, 1, 5)))]
    rows += [row(None), replace(row(None), pooling=Pooling()), replace(row(None), pooling=Pooling((0,)))]
    places = [0, 2, 3, 5, 6, 9] if is_split else list(range(6))
    last, logits = torch.randn(10, 4).bfloat16(), torch.randn(10, 7).bfloat16()
    plan = StepPlan(1, tuple(rows))
    no_arrays = RowArrays(*[np.empty(0, np.int32)] * 10)
    step = PackedStep(plan, no_arrays, np.empty(0, np.int32), np.empty(0, np.int32))
    step = replace_dataclass(step, results=np.array(places, np.int32) if is_split else None)
    pooled = PooledRows(step, StepOutputs(logits, torch.zeros(2, 10), None, last)).collect()
    expected = {1: last[places[1]], 2: logits[places[2], [5, 1, 5]], 4: last[places[4]], 5: logits[places[5], [0]]}
    assert pooled == {index: values.float().numpy().tobytes() for index, values in expected.items()}
    result = result_of(rows, [1, 1, 1, 1, 0, 1], pooled=pooled)
    assert result.pooled == (None, pooled[1], pooled[2], None, None, pooled[5])
