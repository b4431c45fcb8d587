"""Test that README's example of ``LLM`` runs unchanged."""

from __future__ import annotations

import re

import pytest

from support.paths import ROOT

README = ROOT / "README.md"


def test_the_example_answers_its_questions_and_shares_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)
    exec(example, {})
    printed = capsys.readouterr().out
    assert re.search(r"opens at 10:15\..* 0\n.* is green\..* 16\n", printed, re.S)
