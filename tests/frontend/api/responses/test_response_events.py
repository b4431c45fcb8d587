"""Responses as streams and as a whole: a client that collects a stream has the whole, whatever the pieces."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given

from radixkv.errors import NumericalFailure, RequestError
from radixkv.frontend.api.responses.response import ResponsesWriter
from radixkv.frontend.api.responses.schema import ResponsesRequest
from radixkv.generation.output import OutputDelta
from radixkv.generation.parts import ReasoningPart, TextPart, ToolCallPart
from support.answer_parts import ScriptedAnswer, collect, pieces

REQUEST = ResponsesRequest(input="Hi")


def writer(
    deltas: list[OutputDelta[None]], request: ResponsesRequest = REQUEST, error: RequestError | None = None
) -> ResponsesWriter:
    return ResponsesWriter(request, ScriptedAnswer(deltas, error), "m")


def whole(deltas: list[OutputDelta[None]], request: ResponsesRequest = REQUEST) -> Any:
    return json.loads(asyncio.run(writer(deltas, request).whole()))


def stream(deltas: list[OutputDelta[None]], error: RequestError | None = None) -> list[dict[str, Any]]:
    return collect(writer(deltas, error=error).events())


def collected(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the response that the pieces of a stream make; checks it against the items that the events repeat."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, in_progress, *changes, end = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"]["output"] == []
    output: list[dict[str, Any]] = []
    for event in changes:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(output)
            output.append(event["item"])
            continue
        item = output[event["output_index"]]
        assert event["output_index"] == len(output) - 1
        assert event.get("item_id", item["id"]) == item["id"]
        match kind:
            case "content_part.added":
                item["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                item["content"][event["content_index"]]["text"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert item["content"][event["content_index"]]["text"] == event["text"]
            case "content_part.done":
                assert item["content"][event["content_index"]] == event["part"]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "function_call_arguments.done":
                assert item["arguments"] == event["arguments"]
            case "output_item.done":
                assert event["item"] == item | {"status": event["item"]["status"]}
                item["status"] = event["item"]["status"]
            case _:
                pytest.fail(f"an unknown event {kind}")
    assert end["type"] == f"response.{end['response']['status']}"
    assert end["response"]["output"] == output
    response: dict[str, Any] = end["response"]
    return response


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    items = [{name: value for name, value in item.items() if name != "id"} for item in response["output"]]
    return {**response, "output": items, "id": None, "created_at": None}


@given(deltas=pieces())
def test_a_stream_has_the_whole_response(deltas: list[OutputDelta[None]]) -> None:
    assert without_ids(collected(stream(deltas))) == without_ids(whole(deltas))


@given(deltas=pieces())
def test_each_part_of_the_answer_is_an_item(deltas: list[OutputDelta[None]]) -> None:
    parts = asyncio.run(ScriptedAnswer(deltas).whole()).parts
    items = [
        item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        for item in whole(deltas)["output"]
    ]
    assert items == [part.arguments if isinstance(part, ToolCallPart) else part.text for part in parts]


def test_an_answer_that_was_cut_is_incomplete() -> None:
    response = whole([OutputDelta([TextPart("a")], [1], [], "length")])
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"


def test_usage_says_what_the_cache_read_and_wrote() -> None:
    assert whole([OutputDelta([], [1], [], "stop")])["usage"] == {
        "input_tokens": 40,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 16},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 47,
    }


def test_reasoning_is_sealed_on_request() -> None:
    deltas = [OutputDelta([ReasoningPart("Hm")], [1], [], "stop")]
    assert "encrypted_content" not in whole(deltas)["output"][0]
    sealing = ResponsesRequest(input="Hi", include=["reasoning.encrypted_content"])
    assert whole(deltas, sealing)["output"][0]["encrypted_content"].startswith("radixkv:")


def test_a_failure_in_the_middle_of_a_stream_is_an_event() -> None:
    *_, last = stream([OutputDelta([TextPart("a")], [1])], NumericalFailure("the model gave NaN"))
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert "NaN" in last["response"]["error"]["message"]


def test_a_failure_before_the_first_event_is_an_error_of_the_request() -> None:
    with pytest.raises(NumericalFailure):
        stream([], NumericalFailure("the model gave NaN"))
