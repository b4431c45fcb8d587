"""The driver of chaos tells responses with one ending from those with none or two."""

from __future__ import annotations

import json

import pytest

from chaos.endings import COMPLETE, WrongEnding, ending_of

ERROR = {"error": {"message": "it died", "type": "x", "param": None, "code": "runtime_died"}}


def chunk(index: int, reason: str | None) -> dict[str, object]:
    return {"choices": [{"index": index, "text": "a", "finish_reason": reason}]}


def stream(*events: object, n_ends: int = 1) -> str:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n" * n_ends


@pytest.mark.parametrize(
    ("status", "body", "n_choices", "is_stream", "ending"),
    [
        (200, json.dumps(chunk(0, "stop")), 1, False, COMPLETE),
        (503, json.dumps(ERROR), 1, False, "runtime_died"),
        (200, stream(chunk(0, None), chunk(1, "length"), chunk(0, "stop")), 2, True, COMPLETE),
        (200, stream(chunk(0, "stop"), ERROR), 2, True, "runtime_died"),
        (200, stream(ERROR), 1, True, "runtime_died"),
    ],
)
def test_one_ending(status: int, body: str, n_choices: int, is_stream: bool, ending: str) -> None:
    assert ending_of(status, body, n_choices=n_choices, is_stream=is_stream) == ending


@pytest.mark.parametrize(
    ("status", "body", "is_stream"),
    [
        (200, json.dumps(chunk(0, None)), False),
        (200, json.dumps({"choices": []}), False),
        (200, json.dumps(chunk(0, "abort")), False),
        (200, "", False),
        (500, "Internal Server Error", False),
        (503, "{}", False),
        (200, stream(chunk(0, None)), True),
        (200, stream(chunk(0, "stop"), chunk(0, "stop")), True),
        (200, stream(ERROR, chunk(0, "stop")), True),
        (200, stream(chunk(0, "stop"), ERROR), True),
        (200, stream(chunk(0, "stop"), n_ends=2), True),
        (200, stream(chunk(0, "stop"), n_ends=0), True),
        (200, stream(chunk(1, "stop")), True),
    ],
)
def test_no_ending_or_two(status: int, body: str, is_stream: bool) -> None:
    with pytest.raises(WrongEnding):
        ending_of(status, body, n_choices=1, is_stream=is_stream)
