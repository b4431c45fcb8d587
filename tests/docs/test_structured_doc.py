"""The worked examples of docs/structured.md do what the page says."""

from __future__ import annotations

import doctest

from support.paths import ROOT


def test_the_examples_print_what_the_page_says() -> None:
    page = str(ROOT / "docs" / "structured.md")
    failed, attempted = doctest.testfile(page, module_relative=False)
    assert attempted > 5
    assert failed == 0
