"""What other ranks get of a plan, and when rank 0 fails with one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from radixkv.errors import DeviceError, DeviceLost
from radixkv.runtime.device.ranks.fan_out import FanOut
from radixkv.runtime.device.ranks.frames import decode
from radixkv.runtime.device.ranks.processes import RankProcesses
from radixkv.runtime.step.executor import Executor, PageOrigin
from radixkv.runtime.step.plan import History, Row, RowSampling, Scoring, SharedRun, StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.wire.messages import Pooling, pack_tokens

SAMPLING = RowSampling(0.5, 3, 0.9, 7, 2, 0.1, 1.0, 1.0, 1.2, ((5, 1.0),), (6,), 4, True, History(b"12345678", 1))
ROWS = (
    Row(1, 17, 3, pack_tokens([5, 6, 7]), 17, 1, (9,), SAMPLING, n_drafts=2),
    Row(0, 40, 1, None, 40, 2, (), SAMPLING),
    Row(2, 0, 2, pack_tokens([8, 9]), 1, 0, (3,), None, Scoring(pack_tokens([9]), 2)),
    Row(3, 0, 1, pack_tokens([8]), 1, 0, (4,), None, pooling=Pooling((1, 2))),
)
PLAN = StepPlan(3, ROWS, ((1, 2),), (SharedRun((0, 1), 0, 1),), 5, True, 2, 2)


def opened(ranks: SimpleNamespace, launch: Callable[[StepPlan], Any], *, is_asynchronous: bool) -> FanOut:
    executor = SimpleNamespace(
        **dict.fromkeys(
            "device dtype kv_dtype n_pages vocab_size window has_windows n_states window_pool adapters "
            "uses_shared_runs".split()
        ),
        splits_drafts=False,
        is_asynchronous=is_asynchronous,
        page_origin=PageOrigin("cpu", "", "", "", ""),
        launch=launch,
    )
    return FanOut(cast(Executor, executor), cast(RankProcesses, ranks), 2)


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_other_ranks_get_plans_without_sampling(is_asynchronous: bool) -> None:
    frames: list[bytes] = []
    ranks = SimpleNamespace(size=2, send=frames.append, waiting=nullcontext)
    executed: list[StepPlan] = []
    step = SimpleNamespace(sample=lambda _: step, result=lambda: StepResult((), ()))
    fan_out = opened(ranks, lambda plan: executed.append(plan) or step, is_asynchronous=is_asynchronous)
    fan_out.launch(PLAN).sample(None).result()
    assert executed == [PLAN], "rank 0 samples"
    (sent,) = [decode(frame, StepPlan) for frame in frames]
    without: Any = [msgspec.structs.replace(row, sampling=None) for row in ROWS]
    assert sent == msgspec.structs.replace(PLAN, rows=tuple(without))


@pytest.mark.parametrize("error", [MemoryError(), DeviceError("too little"), DeviceLost("gone")])
@pytest.mark.parametrize("part", ["launch", "sample", "result"])
def test_all_ranks_are_lost_where_rank_0_fails_with_a_plan_that_they_have(error: Exception, part: str) -> None:
    def fail(*_: object) -> Any:
        raise error

    ranks = SimpleNamespace(
        size=2, send=lambda _: None, waiting=nullcontext, lost=lambda reason: DeviceLost(reason)
    )
    step = SimpleNamespace(sample=lambda _: step, result=lambda: StepResult((), ()))
    setattr(step, part, fail)
    fan_out = opened(ranks, fail if part == "launch" else lambda _: step, is_asynchronous=True)
    with pytest.raises(DeviceLost, match=str(error) or "MemoryError"):
        fan_out.launch(PLAN).sample(None).result()
