"""The examples of docs/simulator.md."""

from __future__ import annotations

import doctest

from support.paths import ROOT

PAGE = ROOT / "docs" / "simulator.md"


def test_the_examples_of_the_page_give_what_it_says():
    done = doctest.testfile(str(PAGE), module_relative=False)
    assert done.attempted >= 6
    assert done.failed == 0
