"""Messages as streams and as a whole: a client that collects a stream has the whole, whatever the pieces."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given

from radixkv.frontend.api.anthropic.response import MessageWriter
from radixkv.generation.output import OutputDelta
from radixkv.generation.parts import TextPart, ToolCallPart
from support.answer_parts import ScriptedAnswer, collect, pieces


def whole(deltas: list[OutputDelta[None]]) -> Any:
    return json.loads(asyncio.run(MessageWriter(ScriptedAnswer(deltas), "m").whole()))


def stream(deltas: list[OutputDelta[None]]) -> list[dict[str, Any]]:
    return collect(MessageWriter(ScriptedAnswer(deltas), "m").events())


def collected(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the message of a stream, and checks the order of its events as Anthropic's documents describe it."""
    first, *blocks, delta, stop = [event for event in events if event["type"] != "ping"]
    assert (first["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message: dict[str, Any] = first["message"] | delta["delta"] | {"usage": delta["usage"]}
    content: list[dict[str, Any]] = []
    is_open, arguments = False, ""
    for event in blocks:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                is_open, arguments = True, ""
                assert event["index"] == len(content)
                content.append(event["content_block"])
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(content) - 1
                match event["delta"]:
                    case {"type": "text_delta", "text": text}:
                        content[-1]["text"] += text
                    case {"type": "thinking_delta", "thinking": text}:
                        content[-1]["thinking"] += text
                    case {"type": "input_json_delta", "partial_json": text}:
                        arguments += text
            case "content_block_stop":
                assert is_open
                is_open = False
                if content[-1]["type"] == "tool_use":
                    content[-1]["input"] = json.loads(arguments)
            case kind:
                pytest.fail(f"an unknown event {kind}")
    assert not is_open
    return message | {"content": content}


@given(deltas=pieces())
def test_a_stream_has_the_whole_message(deltas: list[OutputDelta[None]]) -> None:
    found, expected = collected(stream(deltas)), whole(deltas)
    assert found.pop("id").startswith("msg_")
    assert expected.pop("id").startswith("msg_")
    assert expected.pop("container") is None
    assert found == expected


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", 7, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
        ("tool_calls", None, ("tool_use", None)),
    ],
)
def test_the_end_is_named_as_anthropic_does(finish_reason: str, stop_reason: Any, expected: Any) -> None:
    message = whole([OutputDelta([TextPart("a")], [1], [], finish_reason, stop_reason)])
    assert (message["stop_reason"], message["stop_sequence"]) == expected


def test_usage_splits_the_prompt_by_what_the_cache_did() -> None:
    expected = {
        "input_tokens": 8,
        "cache_creation_input_tokens": 16,
        "cache_read_input_tokens": 16,
        "output_tokens": 7,
    }
    assert whole([OutputDelta([], [1], [], "stop")])["usage"] == expected


def test_a_call_that_was_cut_has_no_arguments() -> None:
    message = whole([OutputDelta([ToolCallPart(0, "t", "f", '{"a": ')], [1], [], "length")])
    assert message["content"] == [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]
