"""JSON format of ``/v1/chat/completions`` responses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from radixkv.frontend.api.openai.logprobs import RenderedToken, chat_logprobs, chat_token
from radixkv.frontend.api.openai.prompt_logprobs import PromptWithLogprobs
from radixkv.frontend.api.openai.schema import ChatRequest
from radixkv.frontend.served_model import ServedModel
from radixkv.generation.logprobs import TokenRenderer
from radixkv.generation.output import OutputDelta
from radixkv.generation.parts import TextPart, ToolCallPart
from radixkv.wire.messages import unpack_tokens


class ChatFormat:
    """OpenAI's ``chat.completion`` and ``chat.completion.chunk`` objects. See ``CompletionFormat``."""

    def __init__(self, request: ChatRequest, served_model: ServedModel, request_id: str) -> None:
        self._request = request
        tokens_as_ids = request.names_tokens_by_id(default=served_model.names_tokens_by_id)
        self.render_token: TokenRenderer[RenderedToken] = partial(chat_token, as_ids=tokens_as_ids)
        """Renders a token's logprobs in the endpoint's format."""
        self._head = {"id": f"chatcmpl-{request_id}", "created": int(time.time()), "model": served_model.name}
        self.chunk_head = {**self._head, "object": "chat.completion.chunk"}
        """The fields that every chunk of a stream begins with."""

    def whole(
        self, outputs: Sequence[OutputDelta[RenderedToken]], prompts: Sequence[PromptWithLogprobs]
    ) -> dict[str, Any]:
        """Returns the ``chat.completion`` object, from one output per choice."""
        response: dict[str, Any] = {**self._head, "object": "chat.completion"}
        response["choices"] = [
            {
                "index": index,
                "message": self._message(output),
                **self._end(output),
            }
            for index, output in enumerate(outputs)
        ]
        (prompt,) = prompts
        if prompt.entries is not None:
            response["prompt_logprobs"] = prompt.entries
        return response | self._prompt_ids(prompt)

    def chunks(
        self, index: int, output: OutputDelta[RenderedToken], prompt: PromptWithLogprobs, *, is_first: bool
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Returns the chunks with new output of one choice; the very first has only the role."""
        content = self.chunk(index, output, prompt)
        if not is_first:
            return [(content, {})]
        role = {"role": "assistant", "content": ""}
        start = {"index": index, "delta": role, "logprobs": None, "finish_reason": None}
        return [(start, self._prompt_ids(prompt)), (content, {})]

    def chunk(self, index: int, output: OutputDelta[RenderedToken], prompt: PromptWithLogprobs) -> dict[str, Any]:
        """Returns the choice of a chunk with new output of a choice that has begun."""
        return {"index": index, "delta": self._delta(output), **self._end(output)}

    def _message(self, output: OutputDelta[RenderedToken]) -> dict[str, Any]:
        """Returns the message of a whole answer; its content is null if the answer has other parts only."""
        text, calls, reasoning = output.text, output.tool_calls, self._shown_reasoning(output)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not output.parts else None}
        message["refusal"] = None
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [_whole_call(call) for call in calls]
        return message

    def _delta(self, output: OutputDelta[RenderedToken]) -> dict[str, Any]:
        """Returns what is new of an answer."""
        match output.parts:
            case []:
                return {"content": ""}
            case [TextPart(text)]:  # the most frequent
                return {"content": text}
        delta: dict[str, Any] = {}
        if reasoning := self._shown_reasoning(output):
            delta["reasoning_content"] = reasoning
        if content := output.text:
            delta["content"] = content
        if calls := output.tool_calls:
            delta["tool_calls"] = [_call_delta(call) for call in calls]
        return delta

    def _shown_reasoning(self, output: OutputDelta[RenderedToken]) -> str:
        return "" if self._request.include_reasoning is False else output.reasoning

    def _end(self, output: OutputDelta[RenderedToken]) -> dict[str, Any]:
        """Returns the fields after a choice's text."""
        end: dict[str, Any] = {
            "logprobs": chat_logprobs(output.logprobs) if self._request.logprobs else None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self._request.return_token_ids:
            end["token_ids"] = output.token_ids
        return end

    def _prompt_ids(self, prompt: PromptWithLogprobs) -> dict[str, Any]:
        if not self._request.return_token_ids:
            return {}
        return {"prompt_token_ids": unpack_tokens(prompt.prompt.tokens)}


def _whole_call(call: ToolCallPart) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_delta(call: ToolCallPart) -> dict[str, Any]:
    """Returns what is new of a call; only its first delta has id and name."""
    if call.id:
        return {"index": call.index, **_whole_call(call)}
    return {"index": call.index, "function": {"arguments": call.arguments}}
