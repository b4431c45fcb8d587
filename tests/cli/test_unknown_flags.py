"""A flag that does not exist is named, whatever stands behind it, and Ctrl-C leaves no traceback."""

from __future__ import annotations

import pytest

import radixkv.cli
from radixkv.cli import main


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            "bench --num-prompt 5",
            "radixkv bench: error: unknown flag --num-prompt; did you mean --num-prompts?; see",
        ),
        (
            "generate --maxtokens 5 hi",
            "radixkv generate: error: unknown flag --maxtokens; did you mean --max-tokens?",
        ),
        ("generate --maxtokens=5", "radixkv generate: error: unknown flag --maxtokens; did you mean --max-tokens?"),
        ("serve --no-such-flag 4", "radixkv serve: error: unknown flag --no-such-flag; see"),
        ("--port 80 serve", "radixkv: error: unknown flag --port; see"),
        ("bench compare --fast a b", "radixkv bench compare: error: unknown flag --fast; see"),
        ("bench paging --num-shots 3", "radixkv bench paging: error: unknown flag --num-shots; see"),
    ],
)
def test_an_unknown_flag_is_named_and_not_its_value(
    capsys: pytest.CaptureFixture[str], arguments: str, text: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(text)
    assert error.count("\n") == 1


def test_a_text_that_begins_like_a_flag_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--", "--text"], ["--a text"], ["text", "--api-key=--x"]):
        assert main(["explain", "--base-url", "nowhere", *arguments]) == 1
        assert "'nowhere' is not an address" in capsys.readouterr().err


def test_ctrl_c_while_the_flags_are_read_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(radixkv.cli, "_parser", interrupted)
    assert main(["serve"]) == 130
