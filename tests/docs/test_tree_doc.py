import doctest

from support.paths import ROOT

DOCUMENT = ROOT / "docs" / "tree.md"


def test_every_output_in_the_document_is_what_the_code_prints() -> None:
    failed, attempted = doctest.testfile(str(DOCUMENT), module_relative=False)
    assert attempted > 25
    assert failed == 0
