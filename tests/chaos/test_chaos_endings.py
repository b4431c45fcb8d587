"""The driver of chaos tells responses with one ending from those with none or two."""

from __future__ import annotations

import json

import pytest

from chaos.endings import COMPLETE, MESSAGES, RESPONSES, WrongEnding, ending_of, ending_of_agents

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


def typed(*events: dict[str, object]) -> str:
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)


START, STOP = {"type": "message_start"}, {"type": "message_stop"}
END = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}
BROKEN = {"type": "error"} | ERROR
RESPONSE = {"status": "completed", "error": None}
COMPLETED = {"type": "response.completed", "response": RESPONSE}
FAILED = {"type": "response.failed", "response": {"status": "failed"} | ERROR}


@pytest.mark.parametrize(
    ("path", "status", "body", "is_stream", "ending"),
    [
        (MESSAGES, 200, json.dumps({"stop_reason": "max_tokens"}), False, COMPLETE),
        (MESSAGES, 503, json.dumps(BROKEN), False, "runtime_died"),
        (MESSAGES, 503, json.dumps(BROKEN), True, "runtime_died"),
        (MESSAGES, 200, typed(START, END, STOP), True, COMPLETE),
        (MESSAGES, 200, typed(START, BROKEN), True, "runtime_died"),
        (RESPONSES, 200, json.dumps(RESPONSE), False, COMPLETE),
        (RESPONSES, 200, typed({"type": "response.created"}, COMPLETED), True, COMPLETE),
        (RESPONSES, 200, typed({"type": "response.created"}, FAILED), True, "runtime_died"),
    ],
)
def test_one_ending_of_the_apis_of_agents(path: str, status: int, body: str, is_stream: bool, ending: str) -> None:
    assert ending_of_agents(path, status, body, is_stream=is_stream) == ending


@pytest.mark.parametrize(
    ("path", "status", "body", "is_stream"),
    [
        (MESSAGES, 200, json.dumps({"stop_reason": None}), False),
        (MESSAGES, 200, typed(START, END), True),
        (MESSAGES, 200, typed(START, STOP), True),
        (MESSAGES, 200, typed(START, END, END, STOP), True),
        (MESSAGES, 200, typed(START, END, STOP, STOP), True),
        (MESSAGES, 200, typed(START, END, BROKEN), True),
        (MESSAGES, 200, typed(START, END, STOP) + "data: [DONE]\n\n", True),
        (MESSAGES, 200, typed(START, END, STOP)[:-1], True),
        (RESPONSES, 200, json.dumps({"status": "in_progress"}), False),
        (RESPONSES, 200, typed({"type": "response.created"}), True),
        (RESPONSES, 200, typed(COMPLETED, FAILED), True),
        (RESPONSES, 200, typed(FAILED, COMPLETED), True),
        (RESPONSES, 200, "", True),
    ],
)
def test_no_ending_or_two_of_the_apis_of_agents(path: str, status: int, body: str, is_stream: bool) -> None:
    with pytest.raises(WrongEnding):
        ending_of_agents(path, status, body, is_stream=is_stream)
