"""Translation of Anthropic's requests to conversations in OpenAI's chat format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radixkv.errors import InvalidRequest, UnsupportedFeature
from radixkv.frontend.api.anthropic.schema import parse_messages
from radixkv.frontend.api.anthropic.translation import to_chat
from radixkv.frontend.chat import Chat

CLAUDE_CODE = Path(__file__).parent / "claude_code.json"
USER = {"role": "user", "content": "Hi"}


def translate(**body: Any) -> Chat:
    return to_chat(parse_messages(json.dumps({"max_tokens": 5, "messages": [USER], **body}).encode(), 1000))


def texts(message: dict[str, Any]) -> Any:
    content = message["content"]
    return content if isinstance(content, str) else [part["text"] for part in content]


BASH = {"type": "bash_20250124", "name": "bash"}


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ([BASH], {"type": "any"}),
        ([BASH], {"type": "tool", "name": "bash"}),
        ([{"name": "f", "input_schema": {"type": "object"}}, BASH], {"type": "tool", "name": "bash"}),
    ],
)
def test_a_demand_for_a_skipped_tool_names_it(tools: list[Any], choice: Any) -> None:
    with pytest.raises(UnsupportedFeature) as caught:
        translate(tools=tools, tool_choice=choice).tool_use()
    assert caught.value.param == "tool_choice"
    assert f"tools[{len(tools) - 1}] of type 'bash_20250124' and name 'bash'" in str(caught.value)
    assert translate(tools=tools, tool_choice={"type": "auto"}).tool_use().mode in ("auto", "none")


def test_a_body_of_claude_code_is_translated() -> None:
    chat = to_chat(parse_messages(CLAUDE_CODE.read_bytes(), 1000))
    assert [message["role"] for message in chat.messages] == [
        *("system", "user", "user", "assistant", "tool", "tool", "user", "system", "assistant", "user")
    ]
    system, _, _, called, first, second, reminder, *_, thanks = chat.messages
    assert texts(system)[1:] == ["You are Claude Code, Anthropic's official CLI for Claude.", "Be concise."]
    assert system["content"][1]["prompt_cache_breakpoint"] == {"mode": "explicit", "ttl": "1h"}
    assert "prompt_cache_breakpoint" not in system["content"][2], "it names no time"
    assert (texts(called), called["reasoning_content"]) == (["I look."], "I run ls.")
    assert [call["id"] for call in called["tool_calls"]] == ["toolu_1", "toolu_2"]
    function = called["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("Bash", {"command": "ls", "timeout": 5})
    assert [(one["tool_call_id"], texts(one)) for one in (first, second)] == [
        ("toolu_1", ["a.py"]),
        ("toolu_2", ["/home"]),
    ]
    assert texts(reminder) == ["<system-reminder>Be kind.</system-reminder>"]
    assert thanks["content"][0]["prompt_cache_breakpoint"]["ttl"] == "5m"
    (tool,) = chat.tools
    assert tool["type"] == "function"
    assert tool["function"].keys() == {"name", "description", "parameters"}
    assert tool["function"]["parameters"]["required"] == ["command"]
    assert (chat.max_tokens, chat.tool_choice, chat.parallel_tool_calls) == (32000, "auto", None)
    assert chat.variables == {"enable_thinking": True, "reasoning_effort": "medium"}
    assert not chat.continue_final_message


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, (None, None)),
        ({"type": "none"}, ("none", None)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "tool", "name": "f"}, ({"type": "function", "function": {"name": "f"}}, None)),
    ],
)
def test_choices_of_tools_are_translated(choice: Any, expected: tuple[Any, Any]) -> None:
    chat = translate(tool_choice=choice, tools=[{"name": "f", "input_schema": {"type": "object"}}])
    assert (chat.tool_choice, chat.parallel_tool_calls) == expected


def test_settings_of_sampling_are_translated() -> None:
    chat = translate(temperature=0.5, top_p=0.9, top_k=4, stop_sequences=["END"], thinking={"type": "disabled"})
    given = {name: value for name, value in chat.sampling.items() if value is not None}
    assert given == {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "stop": ["END"]}
    assert chat.variables == {"enable_thinking": False}


def test_a_result_of_a_tool_may_be_marked() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": "a", "cache_control": {"ttl": "1h"}}
    (message,) = translate(messages=[{"role": "user", "content": [result]}]).messages
    assert message["content"][-1]["prompt_cache_breakpoint"]["ttl"] == "1h"


def test_a_schema_constrains_the_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chat = translate(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(chat.sampling["structured_outputs"].json) == schema


def test_the_answer_continues_a_last_message_of_the_assistant() -> None:
    assert translate(messages=[USER, {"role": "assistant", "content": "The best is ("}]).continue_final_message
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    for content in ([call], [{"type": "text", "text": "I look."}, call]):
        assert not translate(messages=[USER, {"role": "assistant", "content": content}]).continue_final_message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [USER, {"role": "user", "content": []}]}, "messages"),
        (
            {
                "messages": [USER, {"role": "assistant", "content": "{"}],
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            "output_config",
        ),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "messages"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"system": [{"type": "text", "text": "a", "cache_control": {"ttl": "soon"}}]}, "system"),
        ({"system": [{"type": "text", "text": "a", "cache_control": {"ttl": 5}}]}, "system"),
        ({"tools": [{"name": "f"}]}, "tools"),
        ({"tool_choice": {"type": "all"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"mcp_servers": [{"url": "a"}]}, "mcp_servers"),
        ({"compaction": {"type": "enabled"}}, "compaction"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
        ({"stop": "a"}, "stop"),
        ({"output_format": {"type": "json_schema", "schema": {}}}, "output_format"),
        ({"n": 2}, "n"),
        ({"context_management": "clear"}, "context_management"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_wrong_field_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        translate(**body)
    assert raised.value.param == param
