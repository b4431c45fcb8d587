"""Translation of Anthropic's requests to conversations in OpenAI's chat format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from radixkv.errors import InvalidRequest, UnsupportedFeature, shortened
from radixkv.frontend.api.anthropic.schema import (
    CacheControl,
    CountTokensRequest,
    MessagesRequest,
    OutputConfig,
    parse_count_tokens,
)
from radixkv.frontend.chat import Chat
from radixkv.frontend.http.errors import ThreadNotStored
from radixkv.generation.tools import SkippedTool
from radixkv.wire.request_limits import parse_ttl
from radixkv.wire.structured_outputs import StructuredOutputs

_SKIPPED_BLOCKS = frozenset({"redacted_thinking"})
"""Blocks that only Anthropic's servers can read."""
_MAX_TOKENS = (1 << 31) - 1
"""Longer than any context, and the most that ``SamplingParams`` takes: a greater ``max_tokens`` means the same."""


def prompt_chat(request: CountTokensRequest) -> Chat:
    """Translates the fields that make the prompt. Raises ``InvalidRequest``, which names the field."""
    numbered = [(f"tools[{index}]", tool) for index, tool in enumerate(request.tools or ())]
    tools = [_tool(tool, path) for path, tool in numbered if _is_function(tool)]
    choice, is_parallel = _tool_choice(request.tool_choice)
    messages = list(_messages(request))
    return Chat(
        messages=messages,
        tools=tools,
        skipped_tools=[SkippedTool.of(tool, path) for path, tool in numbered if not _is_function(tool)],
        tool_choice=choice,
        parallel_tool_calls=is_parallel,
        variables=_variables(request),
        continue_final_message=bool(messages) and _is_prefill(messages[-1]),
        model=request.model,
        cache_salt=request.cache_salt or "",
    )


def parse_messages_prompt(body: bytes, max_prompt_tokens: int, misspelt: dict[str, str]) -> Chat:
    """Parses a body of ``/v1/messages`` for its prompt alone. Raises ``InvalidRequest``."""
    return prompt_chat(parse_count_tokens(body, max_prompt_tokens, misspelt))


def to_chat(request: MessagesRequest) -> Chat:
    """Translates a request. Raises ``InvalidRequest``, which names the field."""
    if request.thread:
        raise ThreadNotStored(
            "thread is not supported: conversations are not stored; send all messages", param="thread"
        )
    if request.prewarms:
        _check_prewarming(request)
    chat = prompt_chat(request)
    text_format = _structured_outputs(request.output_config)
    if text_format is not None and chat.continue_final_message:
        raise _invalid(
            "output_config.format describes the whole answer, which a last message of the assistant would begin; "
            "leave one out",
            "output_config",
        )
    return replace(
        chat,
        sampling={
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "stop": request.stop_sequences,
            "structured_outputs": text_format,
            "kv_budget": request.kv_budget,
        },
        pin_s=_pin_s(request.cache_control),
        max_tokens=min(request.max_tokens, _MAX_TOKENS),
        max_tokens_field=None,
        field_names={"stop": "stop_sequences", "structured_outputs": "output_config", "prewarm": "max_tokens"},
        format_field="tools" if text_format is None else "output_config",
        session_id=request.session_id or "",
        priority=request.priority or 0,
        expected_pause_s=request.expected_pause_s,
        generates=not request.prewarms,
    )


def _check_prewarming(request: MessagesRequest) -> None:
    """Raises ``InvalidRequest`` for what Anthropic refuses in a request that only computes its prompt."""
    refused = {
        "stream": bool(request.stream),
        "thinking": request.thinking is not None and request.thinking.type == "enabled",
        "output_config": request.output_config is not None and request.output_config.format is not None,
        "tool_choice": request.tool_choice is not None and request.tool_choice.get("type") in ("any", "tool"),
    }
    for name, is_asked in refused.items():
        if is_asked:
            raise _invalid(f"max_tokens is 0, which generates nothing, and {name} asks for an answer", name)


def _messages(request: CountTokensRequest) -> Iterator[dict[str, Any]]:
    if request.system:
        yield {"role": "system", "content": _texts(request.system, "system", "system")}
    for index, message in enumerate(request.messages):
        path, content = f"messages[{index}]", message.get("content")
        match message.get("role"):
            case "assistant":
                yield _assistant(content, f"{path}.content")
            case "user":
                yield from _user(content, f"{path}.content")
            case "system":
                yield {"role": "system", "content": _texts(content, f"{path}.content", "messages")}
            case role:
                raise _invalid(f"{path}.role is {shortened(role)}; it must be user, assistant or system")


def _user(content: object, path: str) -> Iterator[dict[str, Any]]:
    """Yields the results of tools, and then what the user says."""
    if isinstance(content, str):
        yield {"role": "user", "content": content}
        return
    if content == []:
        raise _invalid(f"{path} is empty; give a text, or at least one block")
    texts = []
    for block, kind, where in _blocks(content, path, "messages"):
        if kind != "tool_result":
            texts.append(_text_part(block, kind, where, "messages"))
            continue
        name = block.get("tool_use_id")
        if not isinstance(name, str):
            raise _invalid(f"{where}.tool_use_id must be a text")
        result = block.get("content")
        parts = [] if result is None else _texts(result, f"{where}.content", "messages")
        if parts:
            parts[-1] |= _breakpoint(block.get("cache_control"), where, "messages")
        yield {"role": "tool", "tool_call_id": name, "content": parts}
    if texts:
        yield {"role": "user", "content": texts}


def _assistant(content: object, path: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, reasoning, calls = [], [], []
    for block, kind, where in _blocks(content, path, "messages"):
        if kind in _SKIPPED_BLOCKS:
            continue
        if kind == "thinking":
            if not isinstance(block.get("thinking"), str):
                raise _invalid(f"{where}.thinking must be a text")
            reasoning.append(block["thinking"])
        elif kind == "tool_use":
            calls.append(_call(block, where))
        else:
            texts.append(_text_part(block, kind, where, "messages"))
    message: dict[str, Any] = {"role": "assistant", "content": texts}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any], path: str) -> dict[str, Any]:
    name, call_id, arguments = block.get("name"), block.get("id"), block.get("input")
    if not isinstance(name, str) or not isinstance(call_id, str) or not isinstance(arguments, dict):
        raise _invalid(f"{path} must have the texts id and name, and the object input")
    function = {"name": name, "arguments": msgspec.json.encode(arguments).decode()}
    return {"id": call_id, "type": "function", "function": function}


def _texts(content: object, path: str, field: str) -> list[dict[str, Any]]:
    """Returns the text parts of a text, or of a list of text blocks."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [_text_part(block, kind, where, field) for block, kind, where in _blocks(content, path, field)]


def _blocks(content: object, path: str, field: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yields the blocks of a content with their types and paths."""
    if not isinstance(content, list):
        raise _invalid(f"{path} must be a text or a list of blocks", field)
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(block, dict) or not isinstance(kind, str):
            raise _invalid(f"{path}[{index}] must be a block, an object with a type", field)
        yield block, kind, f"{path}[{index}]"


def _text_part(block: dict[str, Any], kind: str, path: str, field: str) -> dict[str, Any]:
    if kind != "text":
        raise UnsupportedFeature(
            f"{path} is a block of type {shortened(kind)}, which this release does not support here; send text",
            param=field,
        )
    if not isinstance(block.get("text"), str):
        raise _invalid(f"{path}.text must be a text", field)
    return {"type": "text", "text": block["text"], **_breakpoint(block.get("cache_control"), path, field)}


def _breakpoint(control: object, path: str, field: str) -> dict[str, Any]:
    """Returns the breakpoint of a ``cache_control`` with a ``ttl``; nothing for any other."""
    ttl = control.get("ttl") if isinstance(control, dict) else None
    if ttl is None:
        return {}
    if not isinstance(ttl, str):
        raise _invalid(f"{path}.cache_control.ttl must be a text such as 5m", field)
    parse_ttl(ttl, field)
    return {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": ttl}}


def _is_prefill(message: Mapping[str, Any]) -> bool:
    """Whether the answer continues a message: it is the assistant's, and has text and no calls."""
    return message["role"] == "assistant" and bool(message["content"]) and "tool_calls" not in message


def _is_function(tool: Mapping[str, Any]) -> bool:
    """Whether a tool is one that the client runs; the others are those of Anthropic's servers, and are skipped."""
    return tool.get("type") in (None, "custom")


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    if not isinstance(tool.get("input_schema"), dict):
        raise _invalid(f"{path}.input_schema must be a JSON schema, an object", "tools")
    given = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**given, "parameters": tool["input_schema"]}}


def _tool_choice(choice: Mapping[str, Any] | None) -> tuple[object, bool | None]:
    """Returns ``tool_choice`` and ``parallel_tool_calls`` of OpenAI's chat format."""
    if choice is None:
        return None, None
    is_parallel = None if choice.get("disable_parallel_tool_use") is not True else False
    match choice:
        case {"type": "auto" | "none" as kind}:
            return kind, is_parallel
        case {"type": "any"}:
            return "required", is_parallel
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}, is_parallel
    raise _invalid(
        'tool_choice.type must be auto, any, none, or tool with a name, as in {"type": "tool", "name": "search"}',
        "tool_choice",
    )


def _variables(request: CountTokensRequest) -> dict[str, Any]:
    """Returns the variables of chat templates that switch reasoning on or off, and say how much of it."""
    variables: dict[str, Any] = {}
    if request.thinking is not None:
        variables["enable_thinking"] = request.thinking.type != "disabled"
    if request.output_config is not None and request.output_config.effort is not None:
        variables["reasoning_effort"] = request.output_config.effort
    return variables


def _pin_s(control: CacheControl | None) -> float | None:
    """Returns how long the whole prompt is pinned, in seconds."""
    return None if control is None or control.ttl is None else parse_ttl(control.ttl, "cache_control")


def _structured_outputs(config: OutputConfig | None) -> StructuredOutputs | None:
    if config is None or config.format is None:
        return None
    if config.format.type != "json_schema" or config.format.schema is None:
        raise _invalid("output_config.format must have type json_schema and a schema", "output_config")
    return StructuredOutputs(json=msgspec.json.encode(config.format.schema).decode())


def _invalid(text: str, param: str = "messages") -> InvalidRequest:
    return InvalidRequest(text, param=param)
