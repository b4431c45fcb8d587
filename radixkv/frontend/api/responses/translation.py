"""Translation of Responses requests to conversations in OpenAI's chat format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from radixkv.errors import InvalidRequest, UnsupportedFeature, shortened
from radixkv.frontend.api.responses.items import unsealed_reasoning
from radixkv.frontend.api.responses.schema import ResponsesRequest, TextOptions, parse_responses
from radixkv.frontend.chat import Chat
from radixkv.frontend.shared_fields import PromptCacheOptions
from radixkv.generation.chat_rendering import effort_variables
from radixkv.generation.tools import SkippedTool, skipped_choice_error
from radixkv.wire.structured_outputs import StructuredOutputs

SEALED_REASONING = "reasoning.encrypted_content"
"""The value of ``include`` that asks for the reasoning in a form that clients send back."""
_TEXT_TYPES = frozenset({"input_text", "output_text", "text", "refusal"})
_SYSTEM_ROLES = ("system", "developer")


def parse_responses_prompt(body: bytes, max_prompt_tokens: int, misspelt: dict[str, str]) -> Chat:
    """Parses a body of ``/v1/responses`` for its prompt alone. Raises ``InvalidRequest``."""
    return to_chat(parse_responses(body, max_prompt_tokens, misspelt))


def to_chat(request: ResponsesRequest) -> Chat:
    """Translates a request. Raises ``InvalidRequest``, which names the field."""
    for name in request.include or ():
        if name == "message.output_text.logprobs":
            raise UnsupportedFeature(
                f"include has {name}, which is not supported here; use /v1/chat/completions", param="include"
            )
    options = request.prompt_cache_options
    conversation = _Conversation((options or PromptCacheOptions()).ttl_or_default)
    if request.instructions:
        conversation.add_system([{"type": "text", "text": request.instructions}])
    if isinstance(request.input, str):
        conversation.add({"role": "user", "content": request.input})
    else:
        for index, item in enumerate(request.input):
            conversation.add_item(item, f"input[{index}]")
    for index, tool in enumerate(request.tools or ()):
        if not isinstance(tool.get("type"), str):
            raise _invalid(f"tools[{index}].type must be a text, such as function", "tools")
    skipped = [
        SkippedTool.of(tool, f"tools[{index}]")
        for index, tool in enumerate(request.tools or ())
        if tool["type"] != "function"
    ]
    text_format = _structured_outputs(request.text)
    return Chat(
        messages=conversation.messages,
        tools=[_tool(tool) for tool in request.tools or () if tool["type"] == "function"],
        skipped_tools=skipped,
        tool_choice=_tool_choice(request.tool_choice, skipped),
        parallel_tool_calls=request.parallel_tool_calls,
        sampling={
            "temperature": request.temperature,
            "top_p": request.top_p,
            "structured_outputs": text_format,
            "kv_budget": request.kv_budget,
        },
        max_tokens=request.max_output_tokens,
        max_tokens_field="max_output_tokens",
        field_names={
            "messages": "input",
            "max_tokens": "max_output_tokens",
            "structured_outputs": "text",
            "prewarm": "prompt_cache_options",
        },
        format_field="tools" if text_format is None else "text",
        variables=effort_variables(None if request.reasoning is None else request.reasoning.effort),
        pin_s=None if options is None else options.pin_s,
        model=request.model,
        cache_salt=request.cache_salt or "",
        session_id=request.session_id or "",
        priority=request.priority or 0,
        expected_pause_s=request.expected_pause_s,
        generates=not request.prewarms,
    )


class _Conversation:
    """The messages of the items so far. What the assistant said and called in a row is one message.

    Args:
        breakpoint_ttl: how long a breakpoint that names no time lives.
    """

    def __init__(self, breakpoint_ttl: str) -> None:
        self.messages: list[dict[str, Any]] = []
        self._breakpoint_ttl = breakpoint_ttl

    def add(self, message: dict[str, Any]) -> None:
        """Adds a message of its own."""
        self.messages.append(message)

    def add_system(self, parts: list[dict[str, Any]]) -> None:
        """Adds parts to the system message; it must be the first one in many chat templates."""
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += parts
        else:
            self.add({"role": "system", "content": parts})

    def add_item(self, item: Mapping[str, Any], path: str) -> None:
        """Adds an item of ``input``."""
        match item.get("type"):
            case None | "message":
                self._add_message(item, path)
            case "reasoning":
                self._add_reasoning(item, path)
            case "function_call":
                self._assistant("tool_calls").setdefault("tool_calls", []).append(_call(item, path))
            case "function_call_output":
                if not isinstance(item.get("call_id"), str):
                    raise _invalid(f"{path}.call_id must be a text")
                content = self._texts(item.get("output"), f"{path}.output")
                self.add({"role": "tool", "tool_call_id": item["call_id"], "content": content})
            case "item_reference":
                raise UnsupportedFeature(
                    f"{path} refers to an item of an earlier response, and this server stores none; send the item",
                    param="input",
                )
            case kind:
                raise UnsupportedFeature(
                    f"{path} is of type {shortened(kind)}, which this release does not support; use message, "
                    "reasoning, function_call and function_call_output",
                    param="input",
                )

    def _add_message(self, item: Mapping[str, Any], path: str) -> None:
        role, content = item.get("role"), self._texts(item.get("content"), f"{path}.content")
        if role in _SYSTEM_ROLES:
            self.add_system(content)
        elif role == "assistant":
            self._assistant("content")["content"] = content
        elif role == "user":
            self.add({"role": "user", "content": content})
        else:
            raise _invalid(f"{path}.role is {shortened(role)}; it must be user, assistant, system or developer")

    def _add_reasoning(self, item: Mapping[str, Any], path: str) -> None:
        content = item.get("content")
        if not isinstance(content, list | None):
            raise _invalid(f"{path}.content must be a list")
        texts = [part.get("text") for part in content or () if isinstance(part, dict)]
        text = "".join(text for text in texts if isinstance(text, str))
        text = text or unsealed_reasoning(item.get("encrypted_content"))
        if text:
            self._assistant("reasoning_content")["reasoning_content"] = text

    def _assistant(self, adds: str) -> dict[str, Any]:
        """Returns the assistant's message to which a field is added: the last one, unless that has later fields."""
        order = ("reasoning_content", "content", "tool_calls")
        last = self.messages[-1] if self.messages else None
        later = order[order.index(adds) :] if adds != "tool_calls" else ()
        if last is None or last["role"] != "assistant" or any(last.get(name) for name in later):
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        return last

    def _texts(self, content: object, path: str) -> list[dict[str, Any]]:
        """Returns the text parts of a text or of a list of parts."""
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise _invalid(f"{path} must be a text or a list of parts")
        return [_text_part(part, f"{path}[{index}]", self._breakpoint_ttl) for index, part in enumerate(content)]


def _text_part(part: object, path: str, breakpoint_ttl: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in _TEXT_TYPES:
        raise UnsupportedFeature(
            f"{path} is of type {shortened(kind)}, and this release supports text only", param="input"
        )
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if kind is None or not isinstance(text, str):
        raise _invalid(f'{path} must be {{"type": "input_text", "text": ...}} with a text')
    marker = part.get("prompt_cache_breakpoint") if isinstance(part, dict) else None
    if marker is None:
        return {"type": "text", "text": text}
    if not isinstance(marker, dict) or marker.get("mode") != "explicit":
        raise _invalid(f'{path}.prompt_cache_breakpoint must be an object with "mode": "explicit"')
    timed = {**marker, "ttl": breakpoint_ttl if marker.get("ttl") is None else marker["ttl"]}
    return {"type": "text", "text": text, "prompt_cache_breakpoint": timed}


def _call(item: Mapping[str, Any], path: str) -> dict[str, Any]:
    name, call_id, arguments = item.get("name"), item.get("call_id"), item.get("arguments")
    if not isinstance(name, str) or not isinstance(call_id, str) or not isinstance(arguments, str):
        raise _invalid(f"{path} must have the texts call_id, name and arguments")
    try:
        json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        raise _invalid(f"{path}.arguments is not JSON") from None
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _tool_choice(choice: object, skipped: Sequence[SkippedTool]) -> object:
    """Returns ``tool_choice`` of OpenAI's chat format; what is malformed stays as it is, and is refused later.

    Raises:
        UnsupportedFeature: it demands a call of a tool that is skipped.
    """
    match choice:
        case {"type": "function", "name": str(name)}:
            return _named(name)
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools)}:
            chosen = [tool for one in tools for tool in _meant(one, skipped)]
            allowed = [_tool_choice(one, ()) for one in tools if not _meant(one, skipped)]
            if allowed or not chosen:
                return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
            if mode == "auto":
                return "none"
            raise skipped_choice_error(chosen)
    if chosen := _meant(choice, skipped):
        raise skipped_choice_error(chosen)
    return choice


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _meant(choice: object, skipped: Sequence[SkippedTool]) -> list[SkippedTool]:
    """Returns the skipped tools that a choice means, by its type, and by its name if it has one."""
    if not isinstance(choice, dict) or choice.get("type") == "function":
        return []
    name = choice.get("name")
    return [tool for tool in skipped if tool.kind == choice.get("type") and name in (None, tool.name)]


def _structured_outputs(text: TextOptions | None) -> StructuredOutputs | None:
    if text is None or text.format is None:
        return None
    match text.format.type:
        case "text":
            return None
        case "json_object":
            return StructuredOutputs(json_object=True)
        case "json_schema" if text.format.schema is not None:
            return StructuredOutputs(json=msgspec.json.encode(text.format.schema).decode())
    raise _invalid("text.format must have type text, json_object, or json_schema with a schema", "text")


def _invalid(text: str, param: str = "input") -> InvalidRequest:
    return InvalidRequest(text, param=param)
