"""The state machines, with many more and longer histories than in every change's tests.

``--hypothesis-seed`` is the number that the histories are drawn from.
"""

from __future__ import annotations

import pytest
from hypothesis.stateful import RuleBasedStateMachine

from support.engine_machine import (
    CopyingEngineMachine,
    DiskEngineMachine,
    EngineMachine,
    MixedEngineMachine,
    RecurrentEngineMachine,
    TenantEngineMachine,
    TieredEngineMachine,
    WindowedEngineMachine,
)
from support.histories import run_histories
from support.loop_machine import LoopMachine
from support.publishing_machine import PublishingMachine
from support.tree_machine import TreeMachine

N_BLOCKS = 10
"""They run side by side, each from a seed of its own."""


# The numbers of histories are such that a block of each machine takes some 20 s of one core, of `TreeMachine` 40.
@pytest.mark.nightly
@pytest.mark.parametrize("block", range(N_BLOCKS))
@pytest.mark.parametrize(
    ("machine", "n_histories", "n_steps"),
    [
        (EngineMachine, 160, 120),
        (CopyingEngineMachine, 120, 100),
        (WindowedEngineMachine, 160, 100),
        (RecurrentEngineMachine, 160, 100),
        (MixedEngineMachine, 120, 100),
        (TenantEngineMachine, 120, 100),
        (TieredEngineMachine, 90, 100),
        (DiskEngineMachine, 50, 100),
        (LoopMachine, 450, 100),
        (PublishingMachine, 75, 100),
        (TreeMachine, 280, 200),
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
