"""JSON format of ``/v1/completions`` responses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from radixkv.frontend.api.openai.logprobs import RenderedToken, completion_logprobs, completion_token
from radixkv.frontend.api.openai.prompt_logprobs import PromptWithLogprobs
from radixkv.frontend.api.openai.schema import CompletionRequest
from radixkv.frontend.served_model import ServedModel
from radixkv.generation.logprobs import TokenRenderer
from radixkv.generation.output import OutputDelta
from radixkv.wire.messages import unpack_tokens


class CompletionFormat:
    """OpenAI's ``text_completion`` objects, with the same fields in a stream and in a whole response.

    Args:
        request: the parsed body.
        served_model: answers it.
        request_id: of the reply's ``id``.
    """

    def __init__(self, request: CompletionRequest, served_model: ServedModel, request_id: str) -> None:
        self._request = request
        tokens_as_ids = request.names_tokens_by_id(default=served_model.names_tokens_by_id)
        self.render_token: TokenRenderer[RenderedToken] = partial(completion_token, as_ids=tokens_as_ids)
        """Renders a token's logprobs in the endpoint's format."""
        self._has_logprobs = request.n_logprobs is not None
        self.chunk_head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served_model.name,
        }
        """The fields that a whole response, and every chunk of a stream, begins with."""

    def whole(
        self, outputs: Sequence[OutputDelta[RenderedToken]], prompts: Sequence[PromptWithLogprobs]
    ) -> dict[str, Any]:
        """Returns the ``text_completion`` object, from one output per choice."""
        n = self._request.n_choices
        choices = [
            self._choice(index, output, prompts[index // n], is_first=True) for index, output in enumerate(outputs)
        ]
        return {**self.chunk_head, "choices": choices}

    def chunks(
        self, index: int, output: OutputDelta[RenderedToken], prompt: PromptWithLogprobs, *, is_first: bool
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Returns the one chunk with new output of a choice; it has no field outside ``choices``."""
        return [(self._choice(index, output, prompt, is_first=is_first), {})]

    def chunk(self, index: int, output: OutputDelta[RenderedToken], prompt: PromptWithLogprobs) -> dict[str, Any]:
        """Returns the choice of a chunk with new output of a choice that has begun."""
        return self._choice(index, output, prompt, is_first=False)

    def _choice(
        self, index: int, output: OutputDelta[RenderedToken], prompt: PromptWithLogprobs, *, is_first: bool
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": output.text,
            "logprobs": completion_logprobs(output.logprobs) if self._has_logprobs else None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if prompt.entries is not None:
            choice["prompt_logprobs"] = prompt.entries
        if self._request.return_token_ids:
            choice["token_ids"] = output.token_ids
            if is_first:
                # Encoded by itself: an encoding call lets no other thread run before it ends.
                choice["prompt_token_ids"] = msgspec.Raw(msgspec.json.encode(unpack_tokens(prompt.prompt.tokens)))
        return choice
