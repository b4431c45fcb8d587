"""Random histories over the real scheduler, cache and tree: every invariant after every half-step, and the naive
model's answers at the end."""

from __future__ import annotations

from hypothesis import settings

from support.engine_machine import (
    CopyingEngineMachine,
    DiskEngineMachine,
    EngineMachine,
    TenantEngineMachine,
    WindowedEngineMachine,
)

EngineMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
TestEngineMachine = EngineMachine.TestCase

DiskEngineMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestDiskEngineMachine = DiskEngineMachine.TestCase

CopyingEngineMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestCopyingEngineMachine = CopyingEngineMachine.TestCase

TenantEngineMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=50, deadline=None)
TestTenantEngineMachine = TenantEngineMachine.TestCase

WindowedEngineMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestWindowedEngineMachine = WindowedEngineMachine.TestCase
