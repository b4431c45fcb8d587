"""Random sessions of a frontend with the loop, over a fake device."""

from __future__ import annotations

from support.cases import examples
from support.loop_machine import LoopMachine

LoopMachine.TestCase.settings = examples(150, stateful_step_count=40)
TestLoopMachine = LoopMachine.TestCase
