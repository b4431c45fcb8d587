"""The tree against its model, on random histories."""

from __future__ import annotations

from hypothesis import settings

from support.tree_machine import TreeMachine

TreeMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestTreeMachine = TreeMachine.TestCase
