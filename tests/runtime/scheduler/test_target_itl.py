"""Prompts take so much of a step that running answers keep their pace."""

from __future__ import annotations

import pytest

from radixkv.runtime.step.plan import Row, StepPlan
from radixkv.runtime.step.step_time import MIN_PROMPT_TOKENS
from support.cases import rest_nightly
from support.engine import Engine, prompt


def plan_of(n_decode: int, n_prompt: int = 0) -> StepPlan:
    lengths = [1] * n_decode + [n_prompt] * bool(n_prompt)
    rows = tuple(Row(slot, 0, n, None, 0, 0, (), None) for slot, n in enumerate(lengths))
    return StepPlan(0, rows, n_decode=n_decode)


def engine_of(decode_s: float, target_itl_ms: float | None) -> Engine:
    """Returns an engine that has seen a decode step of that time, and prompts of 0.1 ms a token."""
    engine = Engine(2048, max_num_batched_tokens=2000, target_itl_ms=target_itl_ms)
    engine.scheduler.forecast.record(plan_of(1), decode_s)
    engine.scheduler.forecast.record(plan_of(0, 1000), 0.1)
    return engine


def prompt_tokens_of_steps(engine: Engine) -> list[int]:
    """Runs to the end; returns each step's tokens of prompts, where it has any."""
    counts = []
    while not engine.scheduler.is_idle:
        if engine.launch() is not None:
            counts.append(engine.scheduler.launched_plans[-1].plan.n_prompt_tokens)
        engine.collect()
    engine.check_outputs()
    return [count for count in counts if count]


@pytest.mark.parametrize(
    ("target_itl_ms", "decode_s", "largest"),
    rest_nightly(
        [(50, 0.01, 400), (50, 0.06, MIN_PROMPT_TOKENS), (500, 0.01, 1999), (None, 0.01, 1999)], kept=(1, 2)
    ),
)
def test_prompts_beside_decode_rows_are_limited_by_the_target(
    target_itl_ms: float | None, decode_s: float, largest: int
) -> None:
    engine = engine_of(decode_s, target_itl_ms)
    engine.add(prompt(9), 40)
    while not any(request.is_decoding for request in engine.scheduler.running):
        engine.turn()
    engine.add(prompt(2100, first=3), 1)
    counts = prompt_tokens_of_steps(engine)
    assert max(counts) == largest - largest % 4
    assert sum(counts) == 2100


def test_prompts_alone_use_the_whole_step() -> None:
    engine = engine_of(0.01, target_itl_ms=50)
    engine.add(prompt(4500), 1)
    assert prompt_tokens_of_steps(engine) == [2000, 2000, 500]
