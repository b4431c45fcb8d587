"""The tree against its model, on random histories."""

from __future__ import annotations

from support.cases import examples
from support.tree_machine import TreeMachine

TreeMachine.TestCase.settings = examples(200, stateful_step_count=40)
TestTreeMachine = TreeMachine.TestCase
