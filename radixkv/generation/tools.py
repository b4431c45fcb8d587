"""The tools that a request offers to the model, and how the model may use them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from radixkv.errors import InvalidRequest, UnsupportedFeature, shortened

ToolMode = Literal["none", "auto", "required"]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MAX_SHOWN = 8
"""Most skipped tools that an error names."""
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""The schema of a function that takes no arguments."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """The JSON schema of its arguments."""
    is_strict: bool
    """Whether the arguments must match the schema, so that a grammar constrains them."""
    definition: dict[str, Any]
    """The tool as chat templates read it: ``{"type": "function", "function": {...}}``."""


@dataclass(frozen=True)
class SkippedTool:
    """A tool of a request that the model is not told of, because it is no function."""

    path: str
    """Where it is in the request, such as ``tools[2]``."""
    kind: str
    """Its type."""
    name: str | None = None
    """Its name, if it has one."""

    @classmethod
    def of(cls, tool: Mapping[str, Any], path: str) -> Self:
        """Returns a request's tool as one that is skipped."""
        name = tool.get("name")
        return cls(path, str(tool["type"]), name if isinstance(name, str) else None)

    def __str__(self) -> str:
        name = "" if self.name is None else f" and name {shortened(self.name)}"
        return f"{self.path} of type {shortened(self.kind)}{name}"


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and which of them the model may or must call."""

    tools: tuple[Tool, ...] = ()
    """All tools. The prompt shows them whatever the choice is, so that requests share a prefix."""
    mode: ToolMode = "none"
    """Whether the answer has no calls, may have calls, or consists of calls."""
    callable_names: frozenset[str] = frozenset()
    """The names of the tools that may be called; all of them unless the request chose some."""
    is_parallel: bool = True
    """Whether one answer may have several calls."""

    @property
    def definitions(self) -> list[dict[str, Any]] | None:
        """The chat template's variable ``tools``; None without tools."""
        return [tool.definition for tool in self.tools] or None

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that may be called, in the order of the request."""
        return [tool for tool in self.tools if tool.name in self.callable_names]

    @property
    def is_constrained(self) -> bool:
        """Whether only a grammar can make the answer obey: calls are demanded, limited, or have strict schemas."""
        if self.mode == "none":
            return False
        is_limited = not self.is_parallel or len(self.callable_names) < len(self.tools)
        return self.mode == "required" or is_limited or any(tool.is_strict for tool in self.callable_tools)


def parse_tool_use(
    tools: object,
    tool_choice: object = None,
    parallel_tool_calls: bool | None = None,
    skipped: Sequence[SkippedTool] = (),
) -> ToolUse:
    """Checks the fields of a chat request about tools.

    Args:
        tools: in OpenAI's chat format, a list of ``{"type": "function", "function": {...}}``; None for no tools.
        tool_choice: ``none``, ``auto``, ``required``, a named function or ``allowed_tools``; None is ``auto``.
        parallel_tool_calls: whether one answer may have several calls; None is true.
        skipped: tools that the request has besides.

    Raises:
        InvalidRequest: a tool or the choice is malformed, or the choice names a tool that is not there. The text
            repeats no other part of the request than names and types of skipped tools.
        UnsupportedFeature: the choice demands a call of a skipped tool.
    """
    parsed = _parse_tools(tools)
    if not parsed:
        if tool_choice not in (None, "none", "auto"):
            if skipped:
                raise skipped_choice_error(skipped)
            raise InvalidRequest("tool_choice needs tools; give tools, or leave it out", param="tool_choice")
        return ToolUse()
    mode, names = _parse_choice(tool_choice)
    known = frozenset(tool.name for tool in parsed)
    for name in names:
        if name not in known:
            if named := [tool for tool in skipped if tool.name == name]:
                raise skipped_choice_error(named)
            raise InvalidRequest(
                "tool_choice names a function that is not in tools; name one that is",
                param="tool_choice",
            )
    is_named = isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function"
    return ToolUse(parsed, mode, frozenset(names) or known, parallel_tool_calls is not False and not is_named)


def skipped_choice_error(skipped: Sequence[SkippedTool]) -> UnsupportedFeature:
    """Returns the error of a ``tool_choice`` that only these tools could meet; there is at least one."""
    shown = ", ".join(map(str, skipped[:_MAX_SHOWN]))
    more = f" and {len(skipped) - _MAX_SHOWN} more" if len(skipped) > _MAX_SHOWN else ""
    return UnsupportedFeature(
        f"tool_choice demands a call, and only functions can be called, so these were skipped: {shown}{more}; "
        "choose a function, or leave tool_choice out",
        param="tool_choice",
    )


def _parse_tools(tools: object) -> tuple[Tool, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise InvalidRequest("tools must be a list of functions", param="tools")
    parsed = tuple(_parse_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    seen: set[str] = set()
    for index, tool in enumerate(parsed):
        if tool.name in seen:
            raise InvalidRequest(
                f"tools[{index}] has the name of an earlier tool; names must differ", param="tools"
            )
        seen.add(tool.name)
    return parsed


def _parse_tool(tool: object, path: str) -> Tool:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if isinstance(kind, str) and kind != "function":
        raise UnsupportedFeature(
            f"{path} is not of type function, and this release supports no other type; leave it out",
            param="tools",
        )
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if kind not in (None, "function") or not isinstance(function, Mapping):
        raise InvalidRequest(f'{path} must be {{"type": "function", "function": {{"name": ...}}}}', param="tools")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{path} needs a name, a text of 1 to 128 letters, digits, '_', '-' or '.'",
            param="tools",
        )
    if not isinstance(function.get("description"), str | None):
        raise InvalidRequest(f"{path} has a description that is no text", param="tools")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = _NO_PARAMETERS
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise InvalidRequest(f'{path} has parameters that are no JSON schema whose type is "object"', param="tools")
    if not isinstance(function.get("strict"), bool | None):
        raise InvalidRequest(f"{path} must have true or false as strict", param="tools")
    # The same order whatever the client's is, because the prompt shows it.
    shown = {"name": name, "description": function.get("description"), "parameters": parameters}
    shown = {key: value for key, value in shown.items() if value is not None}
    shown |= {key: value for key, value in function.items() if key not in (*shown, "strict") and value is not None}
    return Tool(name, parameters, function.get("strict") is True, {"type": "function", "function": shown})


def _parse_choice(choice: object) -> tuple[ToolMode, list[str]]:
    """Returns the mode, and the names that the choice is limited to; no names mean all tools."""
    match choice:
        case None | "auto":
            return "auto", []
        case "none":
            return "none", []
        case "required":
            return "required", []
        case {"type": "function", "function": {"name": str(name)}}:
            return "required", [name]
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*tools]}}:
            if tools:
                return ("required" if mode == "required" else "auto"), [_allowed_name(tool) for tool in tools]
    raise InvalidRequest(
        "tool_choice must be none, auto, required, "
        '{"type": "function", "function": {"name": ...}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}',
        param="tool_choice",
    )


def _allowed_name(tool: object) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise InvalidRequest(
        'each of tool_choice.allowed_tools.tools must be {"type": "function", "function": {"name": ...}}',
        param="tool_choice",
    )
