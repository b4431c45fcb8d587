"""Random histories over the real scheduler, cache and tree: every invariant after every half-step, and the naive
model's answers at the end."""

from __future__ import annotations

import pytest
from hypothesis import settings

from support.actions import drive
from support.engine_machine import EngineMachine

EngineMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestEngineMachine = EngineMachine.TestCase


@pytest.mark.parametrize("block", range(8))
def test_random_histories_keep_every_invariant(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        drive(seed)
