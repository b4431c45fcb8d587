"""The state machines, with many more and longer histories than in every change's tests.

``--hypothesis-seed`` is the number that the histories are drawn from.
"""

from __future__ import annotations

import pytest
from hypothesis.stateful import RuleBasedStateMachine

from support.engine_machine import (
    CopyingEngineMachine,
    EngineMachine,
    TenantEngineMachine,
    WindowedEngineMachine,
)
from support.histories import run_histories
from support.loop_machine import LoopMachine
from support.publishing_machine import PublishingMachine
from support.tree_machine import TreeMachine

N_BLOCKS = 20
"""They run side by side, each from a seed of its own."""


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(N_BLOCKS))
@pytest.mark.parametrize(
    ("machine", "n_histories", "n_steps"),
    [
        (EngineMachine, 1000, 120),
        (CopyingEngineMachine, 500, 100),
        (WindowedEngineMachine, 500, 100),
        (TenantEngineMachine, 500, 100),
        (LoopMachine, 500, 100),
        (PublishingMachine, 300, 100),
        (TreeMachine, 200, 200),
    ],
)
def test_long_histories(
    machine: type[RuleBasedStateMachine],
    n_histories: int,
    n_steps: int,
    block: int,
    request: pytest.FixtureRequest,
) -> None:
    night = int(request.config.getoption("--hypothesis-seed") or 0)
    run_histories(machine, night * N_BLOCKS + block, n_histories, n_steps)
