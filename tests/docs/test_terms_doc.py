"""The worked examples of docs/terms.md print what the page says."""

import doctest

from support.paths import ROOT


def test_the_examples_print_what_the_page_says() -> None:
    failed, attempted = doctest.testfile(str(ROOT / "docs" / "terms.md"), module_relative=False)
    assert attempted > 20
    assert failed == 0
