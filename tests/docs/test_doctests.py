"""The Python sessions in the docs print what the pages say."""

from __future__ import annotations

import doctest

import pytest

from support.paths import ROOT


@pytest.mark.parametrize(
    ("page", "min_examples"), [("simulator", 6), ("structured", 6), ("terms", 21), ("tree", 26)]
)
def test_every_output_of_a_page_is_what_the_code_prints(page: str, min_examples: int) -> None:
    failed, attempted = doctest.testfile(str(ROOT / "docs" / f"{page}.md"), module_relative=False)
    assert attempted >= min_examples
    assert failed == 0
