"""Test of the examples in docs/simulator.md."""

from __future__ import annotations

import doctest

from support.paths import ROOT

PAGE = ROOT / "docs" / "simulator.md"


def test_the_examples_give_the_documented_output():
    done = doctest.testfile(str(PAGE), module_relative=False)
    assert done.attempted >= 6
    assert done.failed == 0
