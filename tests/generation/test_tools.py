"""Tools of a request are checked, and the prompt shows them in one form."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.errors import InvalidRequest
from radixkv.generation.tools import parse_tool_use

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def function(name: object = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


TWO = [function("f"), function("g")]


def test_the_prompt_shows_tools_in_one_order_without_what_only_the_server_reads() -> None:
    tool = {"function": {"strict": True, "parameters": SCHEMA, "description": "d", "name": "f"}, "type": "function"}
    use = parse_tool_use([tool])
    (shown,) = use.definitions or ()
    assert list(shown["function"].items()) == [("name", "f"), ("description", "d"), ("parameters", SCHEMA)]
    assert use.tools[0].is_strict


def test_a_name_may_be_as_long_as_anthropic_allows() -> None:
    """Agents name the tools of MCP servers by server and tool."""
    assert parse_tool_use([function("m" * 128)]).tools[0].name == "m" * 128


def test_a_function_without_parameters_takes_none() -> None:
    (shown,) = parse_tool_use([function(description=None, parameters=None)]).definitions or ()
    assert shown["function"] == {"name": "f", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("tools", [None, []])
def test_no_tools(tools: object) -> None:
    for choice in (None, "none", "auto"):
        use = parse_tool_use(tools, choice)
        assert (use.mode, use.definitions, use.is_constrained) == ("none", None, False)


@pytest.mark.parametrize(
    ("choice", "is_parallel", "mode", "names", "is_constrained"),
    [
        (None, None, "auto", {"f", "g"}, False),
        ("auto", True, "auto", {"f", "g"}, False),
        ("auto", False, "auto", {"f", "g"}, True),
        ("none", False, "none", {"f", "g"}, False),
        ("required", None, "required", {"f", "g"}, True),
        (function("g"), None, "required", {"g"}, True),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function()]}},
            None,
            "auto",
            {"f"},
            True,
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TWO}},
            None,
            "auto",
            {"f", "g"},
            False,
        ),
    ],
)
def test_choices(
    choice: object, is_parallel: bool | None, mode: str, names: set[str], is_constrained: bool
) -> None:
    use = parse_tool_use(TWO, choice, is_parallel)
    assert (use.mode, use.callable_names, use.is_constrained) == (mode, names, is_constrained)
    assert len(use.definitions or ()) == 2


@pytest.mark.parametrize(
    ("tools", "found"),
    [
        ({}, "list"),
        ("f", "list"),
        ([3], r"tools\[0\]"),
        ([{}], r"tools\[0\]"),
        ([{"type": "function"}], r"tools\[0\]"),
        ([{"type": "function", "function": {}}], r"tools\[0\]"),
        ([{"type": 3, "function": {"name": "f"}}], r"tools\[0\]"),
        ([function(), {"type": "web_search"}], r"tools\[1\] is not of type"),
        ([function(None)], r"tools\[0\] .*name"),
        ([function("")], r"tools\[0\] .*name"),
        ([function("a b")], r"tools\[0\] .*name"),
        ([function("a" * 129)], r"tools\[0\] .*name"),
        ([function(), function()], r"tools\[1\] has the name"),
        ([function(description=3)], r"description"),
        ([function(parameters=[])], r"tools\[0\] .*parameters"),
        ([function(parameters={"type": "string"})], r"tools\[0\] .*parameters"),
        ([function(strict="yes")], r"tools\[0\] .*strict"),
    ],
)
def test_wrong_tools(tools: object, found: str) -> None:
    with pytest.raises(InvalidRequest, match=found) as caught:
        parse_tool_use(tools)
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    "choice",
    [
        "any",
        3,
        {},
        {"type": "function"},
        function("h"),
        {"type": "function", "function": {"name": 3}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "any", "tools": TWO}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "mcp"}]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function("h")]}},
    ],
)
def test_wrong_choices(choice: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_tool_use(TWO, choice)
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("choice", ["required", function()])
def test_a_choice_without_tools(choice: object) -> None:
    with pytest.raises(InvalidRequest, match="needs tools") as caught:
        parse_tool_use(None, choice)
    assert caught.value.param == "tool_choice"
