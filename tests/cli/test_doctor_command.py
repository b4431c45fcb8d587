"""Tests of ``radixkv doctor`` with a fake server; tests/e2e has tests with a real one."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.cli import main
from support.fake_openai import FakeServer

MISSES = {"text": "57% were cached", "misses": [{"text": "the date differs"}]}
PAUSES = {
    "open": 1,
    "returns": 3,
    "given_up": 0,
    "text": "1 chat is expected to go on",
    "kinds": [{"text": "tool f"}],
}


@pytest.mark.parametrize(
    ("more", "lines"),
    [
        ({}, []),
        ({"pauses": PAUSES}, ["1 chat is expected to go on", "  tool f"]),
        ({"pauses": PAUSES | {"open": 0, "returns": 0}}, []),
        ({"pauses_missing": "no pauses are shown"}, ["no pauses are shown"]),
    ],
)
def test_pauses_follow_the_misses_once_there_were_any(
    fake: FakeServer, capsys: pytest.CaptureFixture[str], more: dict[str, Any], lines: list[str]
) -> None:
    fake.responses = {"/cache/doctor": lambda _: MISSES | more}
    assert main(["doctor", "--base-url", fake.address]) == 0
    assert capsys.readouterr().out.splitlines() == ["57% were cached", "  the date differs", *lines]


def test_texts_of_models_do_not_control_the_terminal(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = [{"text": "tool \x1b[2J\x1b]0;title\x07\n\u202eé"}]
    fake.responses = {"/cache/doctor": lambda _: MISSES | {"pauses": PAUSES | {"kinds": kinds}}}
    assert main(["doctor", "--base-url", fake.address]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "  tool �[2J�]0;title���é"
