"""What other ranks get of a plan."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

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


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_other_ranks_get_plans_without_sampling(is_asynchronous: bool) -> None:
    frames: list[bytes] = []
    ranks = SimpleNamespace(size=2, send=frames.append, waiting=nullcontext)
    executed: list[StepPlan] = []
    step = SimpleNamespace(sample=lambda _: step, result=lambda: StepResult((), ()))
    executor = SimpleNamespace(
        **dict.fromkeys(
            "device dtype kv_dtype n_pages vocab_size window n_states window_pool uses_shared_runs".split()
        ),
        splits_drafts=False,
        is_asynchronous=is_asynchronous,
        page_origin=PageOrigin("cpu", "", "", "", ""),
        launch=lambda plan: executed.append(plan) or step,
    )
    fan_out = FanOut(cast(Executor, executor), cast(RankProcesses, ranks), 2)
    fan_out.launch(PLAN).sample(None).result()
    assert executed == [PLAN], "rank 0 samples"
    (sent,) = [decode(frame, StepPlan) for frame in frames]
    without: Any = [msgspec.structs.replace(row, sampling=None) for row in ROWS]
    assert sent == msgspec.structs.replace(PLAN, rows=tuple(without))
