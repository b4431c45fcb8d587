"""Messages reach chat templates in one form, whatever client sent them."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.errors import InvalidRequest, UnsupportedFeature
from radixkv.text.chat_messages import normalize_messages


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, **fields}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": {"b": 1}}', '{"a": {"b": 1}}'), ({"a": 1}, {"a": 1}), ("", "{}"), (None, "{}"), ("{}", "{}")],
)
def test_arguments_of_calls_stay_as_they_were_sent(arguments: object, expected: object) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = normalize_messages([assistant(tool_calls=[call])])
    assert message["tool_calls"] == [{**call, "function": {"name": "f", "arguments": expected}}]


@pytest.mark.parametrize(("content", "expected"), [(None, None), ("", ""), ([], ""), ("a", "a")])
def test_a_content_may_be_null_only_beside_calls(content: object, expected: object) -> None:
    call = {"function": {"name": "f"}}
    (message,) = normalize_messages([{"role": "assistant", "content": content, "tool_calls": [call]}])
    assert message["content"] == expected
    (message,) = normalize_messages([{"role": "assistant", "content": content}])
    assert message["content"] == (expected or "")


@pytest.mark.parametrize("calls", [None, []])
def test_a_message_without_calls_has_no_such_key(calls: object) -> None:
    (message,) = normalize_messages([assistant(content="a", tool_calls=calls)])
    assert "tool_calls" not in message


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_content": "a"}, "a"),
        ({"reasoning": "a"}, "a"),
        ({"reasoning_content": None, "reasoning": "a"}, "a"),
        ({"reasoning_content": ""}, None),
        ({"reasoning_content": None}, None),
        ({}, None),
    ],
)
def test_reasoning_has_one_name(fields: dict[str, Any], expected: str | None) -> None:
    (message,) = normalize_messages([assistant(content="b", **fields)])
    assert message.get("reasoning_content") == expected
    assert ("reasoning_content" in message) == (expected is not None)


def test_a_result_needs_no_id_and_may_have_parts() -> None:
    parts = [{"type": "text", "text": "3"}, {"type": "text", "text": "4"}]
    assert normalize_messages([{"role": "tool", "content": parts}]) == [{"role": "tool", "content": "3\n4"}]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"tool_calls": 3}, r"messages\[0\]\.tool_calls"),
        ({"tool_calls": [3]}, r"messages\[0\]\.tool_calls\[0\]"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, r"tool_calls\[0\]\.function\.arguments"),
        ({"reasoning_content": 3}, r"messages\[0\]\.reasoning_content"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest, match=path):
        normalize_messages([assistant(**fields)])


@pytest.mark.parametrize("field", ["images", "image_url", "input_audio", "video"])
@pytest.mark.parametrize("is_part", [False, True])
def test_what_is_no_text_is_refused_where_clients_put_it_beside_a_text(field: str, is_part: bool) -> None:
    """Ollama's messages have ``images``. Templates would leave them out, and the model answer without them."""
    part = {"type": "text", "text": "What is this?", field: ["aGk="]}
    message = {"role": "user", "content": [part]} if is_part else {"role": "user", "content": "", field: ["aGk="]}
    path = r"messages\[0\]\.content\[0\]" if is_part else r"messages\[0\]"
    with pytest.raises(UnsupportedFeature, match=f"^{path} has {field}; this release supports text only$"):
        normalize_messages([message])
    (part if is_part else message)[field] = None
    assert normalize_messages([message])[0]["content"] == ("What is this?" if is_part else "")
