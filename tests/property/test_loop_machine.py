"""Random sessions of a frontend with the loop, over a fake device."""

from __future__ import annotations

from hypothesis import settings

from support.loop_machine import LoopMachine

LoopMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLoopMachine = LoopMachine.TestCase
