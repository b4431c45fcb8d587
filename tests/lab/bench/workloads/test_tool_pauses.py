"""The workload of agents whose tools take their time."""

from __future__ import annotations

import random
from statistics import median

import pytest

from radixkv.lab.bench.session import Reply, ToolCall
from radixkv.lab.bench.workloads.base import Source
from radixkv.lab.bench.workloads.tool_pauses import ToolPauses

NAMES = [f"tool_{number}" for number in range(40)]


def seconds(workload: ToolPauses, name: str, n_times: int = 200) -> list[float]:
    rng = random.Random(1)
    found = [workload.tool_seconds([ToolCall(name, "{}")], rng) for _ in range(n_times)]
    return [one for one in found if one is not None]


def test_each_tool_has_a_median_of_its_own() -> None:
    medians = [median(seconds(ToolPauses(tool_median_s=2.0), name)) for name in NAMES]
    assert median(medians) == pytest.approx(2.0, rel=0.6)
    assert min(medians) > 2.0 / 8 / 1.2
    assert max(medians) < 2.0 * 8 * 1.2
    assert max(medians) > 8 * min(medians)


def test_a_share_of_the_results_never_comes() -> None:
    assert len(seconds(ToolPauses(lost_share=0.25), "tool", 2000)) == pytest.approx(1500, rel=0.05)
    assert len(seconds(ToolPauses(lost_share=0.0), "tool", 100)) == 100


def test_the_slowest_of_several_calls_counts() -> None:
    workload = ToolPauses(lost_share=0.0)
    calls = [ToolCall(name, "{}") for name in NAMES]
    slowest = median(workload.tool_seconds(calls, random.Random(seed)) or 0.0 for seed in range(50))
    assert slowest > max(median(seconds(workload, name)) for name in NAMES)


@pytest.mark.parametrize("lost_share", [0.0, 1.0])
def test_a_turn_comes_after_its_tools(lost_share: float) -> None:
    (session, *_) = ToolPauses(lost_share=lost_share).make(Source(3)).sessions
    turns = session.turns()
    ((first,)) = next(turns)
    assert first.after_s == 0.0
    reply = Reply(("",), (ToolCall(first.tools[0]["function"]["name"], "{}", "id"),))
    if lost_share:
        with pytest.raises(StopIteration):
            turns.send([reply])
    else:
        ((second,)) = turns.send([reply])
        assert second.after_s > 0.0
