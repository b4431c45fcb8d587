"""Random histories of hybrid engines: from cache events alone a subscriber knows what prompts can go on from."""

from __future__ import annotations

from support.cases import examples
from support.state_events_machines import StateEventsMachine, TailEventsMachine

StateEventsMachine.TestCase.settings = examples(40, stateful_step_count=40)
TestStateEventsMachine = StateEventsMachine.TestCase

TailEventsMachine.TestCase.settings = examples(40, stateful_step_count=40)
TestTailEventsMachine = TailEventsMachine.TestCase
