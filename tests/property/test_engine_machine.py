"""Random histories over the real scheduler, cache and tree: every invariant after every half-step, and the naive
model's answers at the end."""

from __future__ import annotations

from support.cases import examples
from support.engine_machine import (
    CopyingEngineMachine,
    DiskEngineMachine,
    DroppingEngineMachine,
    EngineMachine,
    MixedEngineMachine,
    RecurrentEngineMachine,
    TenantEngineMachine,
    WindowedEngineMachine,
)

EngineMachine.TestCase.settings = examples(250, stateful_step_count=50)
TestEngineMachine = EngineMachine.TestCase

DiskEngineMachine.TestCase.settings = examples(100, stateful_step_count=50)
TestDiskEngineMachine = DiskEngineMachine.TestCase

CopyingEngineMachine.TestCase.settings = examples(100, stateful_step_count=50)
TestCopyingEngineMachine = CopyingEngineMachine.TestCase

DroppingEngineMachine.TestCase.settings = examples(100, stateful_step_count=50)
TestDroppingEngineMachine = DroppingEngineMachine.TestCase

TenantEngineMachine.TestCase.settings = examples(25, stateful_step_count=50)
TestTenantEngineMachine = TenantEngineMachine.TestCase

RecurrentEngineMachine.TestCase.settings = examples(150, stateful_step_count=50)
TestRecurrentEngineMachine = RecurrentEngineMachine.TestCase

WindowedEngineMachine.TestCase.settings = examples(150, stateful_step_count=50)
TestWindowedEngineMachine = WindowedEngineMachine.TestCase

MixedEngineMachine.TestCase.settings = examples(150, stateful_step_count=50)
TestMixedEngineMachine = MixedEngineMachine.TestCase
