"""``radixkv chat`` and ``radixkv explain`` beside servers that answer otherwise than they should."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest

from radixkv.cli import main
from support.scripted_server import ScriptedServer

MODELS = {"data": [{"id": "theirs"}]}


def always(answer: Any) -> Callable[[Any], Any]:
    return lambda _: answer


def chat(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    return main(["chat", "--base-url", server.address])


@pytest.mark.parametrize(
    ("models", "text"),
    [
        ({}, "does not answer as this command expects: Object missing required field `data`"),
        ({"data": []}, "lists no model; give the name of one with --model"),
        ({"data": ["theirs"]}, "does not answer as this command expects"),
        ({"data": [{"name": "theirs"}]}, "does not answer as this command expects"),
    ],
)
def test_a_list_of_models_that_is_none_is_one_line(
    scripted: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    models: dict[str, Any],
    text: str,
) -> None:
    scripted.answers["/v1/models"] = always(models)
    assert chat(scripted, monkeypatch) == 1
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("chunks", "shown"),
    [
        ([{"choices": [{}]}, {"choices": [{"delta": {"content": "Hi"}}]}], "Hi"),
        ([{"choices": [{"delta": None, "finish_reason": "stop"}]}], "0 new tokens"),
        (
            [{"choices": [], "usage": {"prompt_tokens": None, "prompt_tokens_details": None}}],
            "an unknown part of 0",
        ),
        ([{"choices": [{"delta": {"content": 5}}]}], "does not answer as this command expects"),
        ([{"choices": "none"}], "does not answer as this command expects"),
    ],
)
def test_odd_chunks_are_read_as_far_as_they_can_be(
    scripted: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    chunks: list[dict[str, Any]],
    shown: str,
) -> None:
    scripted.answers = {"/v1/models": always(MODELS), "/v1/chat/completions": always(chunks)}
    assert chat(scripted, monkeypatch) == 0
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    "answers",
    [
        {"/tokenize": {}},
        {"/tokenize": {"tokens": "abc"}},
        {"/tokenize": {"tokens": [1, 2]}, "/cache/explain": {}},
        {"/tokenize": {"tokens": [1, 2]}, "/cache/explain": {"text": "t", "cached_tokens": "all"}},
        {
            "/tokenize": {"tokens": [1, 2]},
            "/cache/explain": {"text": "t", "cached_tokens": 0},
            "/detokenize": {"text": "ab"},
        },
    ],
)
def test_a_server_that_cannot_explain_is_one_line(
    scripted: ScriptedServer, capsys: pytest.CaptureFixture[str], answers: dict[str, Any]
) -> None:
    scripted.answers = {path: always(answer) for path, answer in answers.items()}
    assert main(["explain", "ab", "--base-url", scripted.address]) == 1
    error = capsys.readouterr().err
    assert "does not answer as this command expects" in error
    assert error.count("\n") == 1
