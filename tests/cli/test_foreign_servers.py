"""Tests of ``radixkv chat`` and ``radixkv explain`` with servers that do not answer as expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from radixkv.cli import main
from support.fake_openai import FakeServer

MODELS = {"data": [{"id": "theirs"}]}


def always(answer: Any) -> Callable[[Any], Any]:
    return lambda _: answer


def chat(server: FakeServer, type_in: Callable[[str], None]) -> int:
    type_in("hello\n")
    return main(["chat", "--base-url", server.address])


@pytest.mark.parametrize(
    ("models", "text"),
    [
        ({}, "`data`"),
        ({"data": []}, "--model"),
        ({"data": ["theirs"]}, "/v1/models"),
        ({"data": [{"name": "theirs"}]}, "/v1/models"),
    ],
)
def test_an_invalid_list_of_models_is_an_error_of_one_line(
    fake: FakeServer,
    type_in: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
    models: dict[str, Any],
    text: str,
) -> None:
    fake.responses["/v1/models"] = always(models)
    assert chat(fake, type_in) == 1
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
        ([{"choices": [{"delta": {"content": 5}}]}], "error: "),
        ([{"choices": "none"}], "error: "),
    ],
)
def test_incomplete_chunks_are_read_and_invalid_ones_reported(
    fake: FakeServer,
    type_in: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
    chunks: list[dict[str, Any]],
    shown: str,
) -> None:
    fake.responses = {"/v1/models": always(MODELS), "/v1/chat/completions": always(chunks)}
    assert chat(fake, type_in) == 0
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
def test_an_invalid_explanation_is_an_error_of_one_line(
    fake: FakeServer, capsys: pytest.CaptureFixture[str], answers: dict[str, Any]
) -> None:
    fake.responses = {path: always(answer) for path, answer in answers.items()}
    assert main(["explain", "ab", "--base-url", fake.address]) == 1
    error = capsys.readouterr().err
    assert error.startswith("radixkv explain: error: ")
    assert fake.address in error
    assert error.count("\n") == 1
