"""Test of the examples in docs/plan.md."""

from __future__ import annotations

import re
import shlex

import pytest

from radixkv.cli import main
from support.paths import ROOT

TEXT = (ROOT / "docs" / "plan.md").read_text()
EXAMPLES = re.findall(r"^\$ radixkv (plan .*)\n((?:.*\n)*?)```", TEXT, re.MULTILINE)


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    (config,) = re.findall(r"^```json\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    (tmp_path / "llama-70b").mkdir()
    (tmp_path / "llama-70b" / "config.json").write_text(config)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("checkpoint")
@pytest.mark.parametrize(("command", "output"), EXAMPLES)
def test_an_example_prints_what_the_page_shows(command, output, capsys):
    is_error = output.startswith("radixkv plan: error: ")
    assert main(shlex.split(command)) == is_error
    printed = capsys.readouterr()
    assert (printed.err if is_error else printed.out) == output


def test_there_are_examples():
    assert len(EXAMPLES) == 2
