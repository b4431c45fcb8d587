"""How requests end: with all their answers, with one error, or with a connection that was cut."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

COMPLETE = "complete"
LEFT = "client left"
CUT = "cut"
"""The connection was refused, or it ended without a whole response."""
_REASONS = {"stop", "length"}


FAILED_RESPONSE = "server_error"
"""OpenAI's code of a stream of ``RESPONSES`` that failed, whatever happened."""
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
_STOP_REASONS = {"end_turn", "max_tokens", "stop_sequence"}
_STREAM_ENDS = {"message_stop", "error", "response.completed", "response.incomplete", "response.failed"}


class WrongEnding(Exception):
    """A response has no ending, or more than one."""


def ending_of(status: int, body: str, *, n_choices: int, is_stream: bool) -> str:
    """Returns how a whole response about completions or chats ended: ``COMPLETE``, or the code of its error.

    Args:
        status: of HTTP.
        body: the whole text.
        n_choices: how many answers the request asked for, over all prompts.
        is_stream: whether it asked for a stream.

    Raises:
        WrongEnding: an answer has no ending, two endings or one of an unknown kind.
    """
    if status != 200:
        return _code(_parsed(body))
    if is_stream:
        return _ending_of_stream(body, n_choices)
    response = _parsed(body)
    choices = response.get("choices", [])
    _check_choices({choice["index"]: choice["finish_reason"] for choice in choices}, len(choices), n_choices, body)
    return COMPLETE


def _ending_of_stream(body: str, n_choices: int) -> str:
    *lines, done, end = body.split("\n\n")
    if (done, end) != ("data: [DONE]", "") or done in lines:
        raise WrongEnding(f"not one end of a stream: ...{body[-300:]}")
    events = [_parsed(line.removeprefix("data: ")) for line in lines]
    if any("error" in event for event in events[:-1]):
        raise WrongEnding(f"a stream goes on after an error: ...{body[-600:]}")
    ends = [
        (choice["index"], choice["finish_reason"])
        for event in events
        for choice in event.get("choices", [])
        if choice["finish_reason"] is not None
    ]
    if events and "error" in events[-1]:
        if len(ends) == n_choices:
            raise WrongEnding(f"an error follows all finish reasons: ...{body[-600:]}")
        return _code(events[-1])
    _check_choices(dict(ends), len(ends), n_choices, body)
    return COMPLETE


def ending_of_agents(path: str, status: int, body: str, *, is_stream: bool) -> str:
    """Returns how a whole response of ``MESSAGES`` or ``RESPONSES`` ended, as ``ending_of`` does."""
    if status != 200:
        return _code(_parsed(body))
    if path == RESPONSES:
        return _ending_of_response(_typed_events(body)[-1]["response"] if is_stream else _parsed(body))
    if not is_stream:
        reasons = [_parsed(body).get("stop_reason")]
    else:
        events = _typed_events(body)
        reasons = [
            "error" if event["type"] == "error" else event["delta"]["stop_reason"]
            for event in events
            if event["type"] in ("message_delta", "error")
        ]
        if reasons == ["error"]:
            return _code(events[-1])
    if len(reasons) != 1 or reasons[0] not in _STOP_REASONS:
        raise WrongEnding(f"the message ends by {reasons}: ...{body[-600:]}")
    return COMPLETE


def _typed_events(body: str) -> list[dict[str, Any]]:
    """Returns the events of a stream of which only the last one is an end."""
    *texts, rest = body.split("\n\n")
    events = []
    for text in texts:
        name, _, data = text.partition("\n")
        events.append(_parsed(data.removeprefix("data: ")))
        if name != f"event: {events[-1].get('type')}":
            raise WrongEnding(f"not an event with its type: {text[:300]}")
    is_end = [event["type"] in _STREAM_ENDS for event in events]
    if rest or is_end.count(True) != 1 or not is_end[-1]:
        raise WrongEnding(f"not one end of a stream: ...{body[-600:]}")
    return events


def _ending_of_response(response: dict[str, Any]) -> str:
    match response:
        case {"status": "failed"}:
            return _code(response)
        case {"status": "completed" | "incomplete", "error": None}:
            return COMPLETE
    raise WrongEnding(f"not an end of a response: {str(response)[:300]}")


def _check_choices(ends: dict[int, str], n_ends: int, n_choices: int, body: str) -> None:
    if set(ends) != set(range(n_choices)) or n_ends != n_choices or not set(ends.values()) <= _REASONS:
        raise WrongEnding(f"{n_choices} choices end as {ends}, {n_ends} endings: ...{body[-600:]}")


def _parsed(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        raise WrongEnding(f"not JSON: {text[:300]!r}") from None
    if not isinstance(value, dict):
        raise WrongEnding(f"not an object: {text[:300]!r}")
    return value


def _code(body: dict[str, Any]) -> str:
    match body:
        case {"error": {"code": str(code), "message": str()}}:
            return code
    raise WrongEnding(f"not an error: {str(body)[:300]}")


def unexpected(endings: Counter[str], allowed: set[str]) -> dict[str, int]:
    """Returns the endings that are not allowed."""
    return {ending: count for ending, count in endings.items() if ending not in allowed}
