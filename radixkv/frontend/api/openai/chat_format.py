"""JSON format of ``/v1/chat/completions`` responses."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from radixkv.frontend.api.openai.logprobs import RenderedToken, chat_logprobs, chat_token
from radixkv.frontend.api.openai.prompt_logprobs import PromptWithLogprobs
from radixkv.frontend.api.openai.schema import ChatRequest
from radixkv.generation.logprobs import TokenRenderer
from radixkv.generation.output import OutputDelta
from radixkv.wire import unpack_tokens


class ChatFormat:
    """OpenAI's ``chat.completion`` and ``chat.completion.chunk`` objects."""

    def __init__(self, request: ChatRequest, model: str) -> None:
        self._request = request
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    @property
    def render_token(self) -> TokenRenderer[RenderedToken]:
        """Renders a token's logprobs as chat does."""
        return chat_token

    def whole(
        self, outputs: Sequence[OutputDelta[RenderedToken]], prompts: Sequence[PromptWithLogprobs]
    ) -> dict[str, Any]:
        """Returns the ``chat.completion`` object, from one output per choice."""
        response: dict[str, Any] = {**self._head, "object": "chat.completion"}
        response["choices"] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": output.text, "refusal": None},
                **self._end(output),
            }
            for index, output in enumerate(outputs)
        ]
        (prompt,) = prompts
        if prompt.entries is not None:
            response["prompt_logprobs"] = prompt.entries
        return response | self._prompt_ids(prompt)

    @property
    def chunk_head(self) -> dict[str, Any]:
        """The fields that every chunk of a stream begins with."""
        return {**self._head, "object": "chat.completion.chunk"}

    def chunks(
        self, index: int, output: OutputDelta[RenderedToken], prompt: PromptWithLogprobs, *, is_first: bool
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Returns the chunks with new output of one choice; the very first has only the role."""
        content: dict[str, Any] = {"index": index, "delta": {"content": output.text}, **self._end(output)}
        if not is_first:
            return [(content, {})]
        role = {"role": "assistant", "content": ""}
        start = {"index": index, "delta": role, "logprobs": None, "finish_reason": None}
        return [(start, self._prompt_ids(prompt)), (content, {})]

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
