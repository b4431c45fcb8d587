"""Translation of Responses requests to conversations in OpenAI's chat format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radixkv.errors import InvalidRequest, UnsupportedFeature
from radixkv.frontend.api.responses.items import sealed_reasoning
from radixkv.frontend.api.responses.schema import parse_responses
from radixkv.frontend.api.responses.translation import to_chat
from radixkv.frontend.chat import Chat

TEXT = {"type": "input_text", "text": "a"}
CODEX = Path(__file__).parent / "codex.json"


def translate(**body: Any) -> Chat:
    return to_chat(parse_responses(json.dumps({"input": "Hi", **body}).encode(), 1000))


def texts(message: dict[str, Any]) -> Any:
    content = message["content"]
    return content if isinstance(content, str) else [part["text"] for part in content]


def test_a_body_of_codex_is_translated() -> None:
    chat = to_chat(parse_responses(CODEX.read_bytes(), 1000))
    assert [message["role"] for message in chat.messages] == [
        *("system", "user", "user", "assistant", "tool", "tool", "assistant", "user")
    ]
    system, _, _, called, first, second, said, _ = chat.messages
    assert texts(system) == [
        "You are a coding agent running in the Codex CLI.",
        "<permissions>Ask first.</permissions>",
    ]
    assert (texts(called), called["reasoning_content"]) == (["I look."], "I run ls.")
    assert [(call["id"], call["function"]["arguments"]) for call in called["tool_calls"]] == [
        ("call_1", '{"cmd": "ls"}'),
        ("call_2", '{"cmd": "pwd"}'),
    ]
    assert [(one["tool_call_id"], texts(one)) for one in (first, second)] == [
        ("call_1", ["a.py"]),
        ("call_2", ["/repo"]),
    ]
    assert texts(said) == ["There is a.py."]
    assert "reasoning_content" not in said, "another server's reasoning cannot be read"
    (tool,) = chat.tools
    assert (tool["function"]["name"], tool["function"]["strict"]) == ("exec_command", False)
    assert (chat.tool_choice, chat.parallel_tool_calls, chat.max_tokens) == ("auto", True, None)
    assert chat.variables == {"enable_thinking": True, "reasoning_effort": "medium"}


def test_reasoning_comes_back_as_it_was_sent() -> None:
    for item in (
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm é"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": sealed_reasoning("Hm é")},
    ):
        chat = translate(input=[{"role": "user", "content": "a"}, item, {"role": "assistant", "content": "b"}])
        assert [message.get("reasoning_content") for message in chat.messages] == [None, "Hm é"]


def test_each_turn_of_the_assistant_is_a_message_of_its_own() -> None:
    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
    said = {"role": "assistant", "content": "a"}
    roles = [len(message.get("tool_calls", ())) for message in translate(input=[said, call, said, said]).messages]
    assert roles == [1, 0, 0]


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ({"format": {"type": "json_object"}}, "json_object", True),
        (
            {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
            "json",
            '{"type":"object"}',
        ),
    ],
)
def test_a_format_constrains_the_answer(text: Any, field: str, value: Any) -> None:
    assert getattr(translate(text=text).sampling["structured_outputs"], field) == value
    assert translate(text={"format": {"type": "text"}}).sampling["structured_outputs"] is None


def test_choices_of_tools_are_translated() -> None:
    assert translate(tool_choice="required").tool_choice == "required"
    named = {"type": "function", "function": {"name": "f"}}
    assert translate(tool_choice={"type": "function", "name": "f"}).tool_choice == named
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    expected = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    assert translate(tool_choice=allowed).tool_choice == expected


CUSTOM = {"type": "custom", "name": "apply_patch"}
SEARCH = {"type": "web_search"}
FUNCTION = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("tools", "choice", "named"),
    [
        ([CUSTOM, SEARCH], "required", ["tools[0]", "custom", "apply_patch", "tools[1]", "web_search"]),
        ([CUSTOM], CUSTOM, ["tools[0]", "apply_patch"]),
        ([FUNCTION, CUSTOM], CUSTOM, ["tools[1]", "apply_patch"]),
        ([FUNCTION, CUSTOM], {"type": "function", "name": "apply_patch"}, ["tools[1]", "apply_patch"]),
        ([FUNCTION, SEARCH], {"type": "web_search"}, ["tools[1]", "web_search"]),
        (
            [FUNCTION, CUSTOM],
            {"type": "allowed_tools", "mode": "required", "tools": [CUSTOM]},
            ["tools[1]", "apply_patch"],
        ),
    ],
)
def test_a_demand_for_a_skipped_tool_names_it(tools: list[Any], choice: Any, named: list[str]) -> None:
    with pytest.raises(UnsupportedFeature) as caught:
        translate(tools=tools, tool_choice=choice).tool_use()
    assert caught.value.param == "tool_choice"
    assert all(name in str(caught.value) for name in named)


@pytest.mark.parametrize(
    ("choice", "mode", "callable_names"),
    [
        ("auto", "auto", {"f"}),
        ("required", "required", {"f"}),
        ({"type": "allowed_tools", "mode": "required", "tools": [CUSTOM, FUNCTION]}, "required", {"f"}),
        ({"type": "allowed_tools", "mode": "auto", "tools": [CUSTOM]}, "none", None),
    ],
)
def test_skipped_tools_do_no_harm_beside_functions(choice: Any, mode: str, callable_names: Any) -> None:
    tools = translate(tools=[CUSTOM, FUNCTION], tool_choice=choice).tool_use()
    assert tools.mode == mode
    assert callable_names in (None, tools.callable_names)


def test_arguments_that_are_no_json_are_named() -> None:
    call = {"type": "function_call", "name": "f", "arguments": '{"a": ', "call_id": "c"}
    with pytest.raises(InvalidRequest, match=r"input\[1\]\.arguments"):
        translate(input=[{"type": None, "role": "user", "content": "a"}, call])


@pytest.mark.parametrize(
    ("options", "pin_s", "ttls"),
    [
        (None, None, ["1h", "30m"]),
        ({}, 1800.0, ["1h", "30m"]),
        ({"ttl": "5m"}, 300.0, ["1h", "5m"]),
        ({"mode": "explicit", "ttl": "5m"}, None, ["1h", "5m"]),
    ],
)
def test_options_of_the_cache_pin_the_prompt(options: Any, pin_s: float | None, ttls: list[str]) -> None:
    marked = [{**TEXT, "prompt_cache_breakpoint": {"mode": "explicit", **ttl}} for ttl in ({"ttl": "1h"}, {})]
    chat = translate(input=[{"role": "user", "content": [TEXT, *marked]}], prompt_cache_options=options)
    parts = chat.messages[0]["content"]
    assert "prompt_cache_breakpoint" not in parts[0]
    assert [part["prompt_cache_breakpoint"]["ttl"] for part in parts[1:]] == ttls
    assert chat.pin_s == pin_s


def test_reasoning_is_switched_on_and_off_by_its_effort() -> None:
    assert translate().variables == {}
    assert translate(reasoning={"effort": "low"}).variables["enable_thinking"] is True
    assert translate(reasoning={"effort": "none"}).variables == {"enable_thinking": False}
    assert translate(reasoning={}).variables == {}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input"),
        ({"input": [{"role": "nobody", "content": "a"}]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input"),
        ({"input": [{"type": "reasoning", "content": "a"}]}, "input"),
        ({"input": [{"role": "user", "content": [{**TEXT, "prompt_cache_breakpoint": True}]}]}, "input"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "middle"}, "truncation"),
        ({"prompt_cache_options": {"ttl": "soon"}}, "prompt_cache_options"),
        ({"tools": [{"name": "f"}]}, "tools"),
        ({"n": 2}, "n"),
        ({"stop": ["END"]}, "stop"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": [{}]}, "messages"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_wrong_field_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        translate(**body)
    assert raised.value.param == param


def test_what_asks_for_nothing_is_accepted() -> None:
    nothing = {"store": False, "previous_response_id": None, "background": False, "truncation": "disabled"}
    assert translate(**nothing, top_logprobs=0, prompt_cache_key="a", user="b").messages == [
        {"role": "user", "content": "Hi"}
    ]
