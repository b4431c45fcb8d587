"""Tests that an unknown flag is named, whatever follows it, and that Ctrl-C gives no traceback."""

from __future__ import annotations

import re

import pytest

import radixkv.cli
from radixkv.cli import main


@pytest.mark.parametrize(
    ("arguments", "command", "flag", "similar"),
    [
        ("bench --num-prompt 5", "radixkv bench", "--num-prompt", "--num-prompts"),
        ("generate --maxtokens 5 hi", "radixkv generate", "--maxtokens", "--max-tokens"),
        ("generate --maxtokens=5", "radixkv generate", "--maxtokens", "--max-tokens"),
        ("serve --no-such-flag 4", "radixkv serve", "--no-such-flag", None),
        ("--port 80 serve", "radixkv", "--port", None),
        ("bench compare --fast a b", "radixkv bench compare", "--fast", None),
        ("bench paging --num-shots 3", "radixkv bench paging", "--num-shots", None),
    ],
)
def test_an_unknown_flag_is_named_and_not_its_value(
    capsys: pytest.CaptureFixture[str], arguments: str, command: str, flag: str, similar: str | None
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{command}: error: ")
    assert error.count("\n") == 1
    named = re.findall(r"--[\w-]+", error)
    assert named[0] == flag
    if similar is None:
        assert set(named) <= {flag, "--help"}
    else:
        assert similar in named


def test_a_prompt_may_start_like_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--", "--text"], ["--a text"], ["text", "--api-key=--x"]):
        assert main(["explain", "--base-url", "nowhere", *arguments]) == 1
        assert "'nowhere'" in capsys.readouterr().err


def test_ctrl_c_while_the_flags_are_read_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(radixkv.cli, "parser_for", interrupted)
    assert main(["serve"]) == 130
