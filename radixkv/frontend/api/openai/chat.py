"""How replies of ``/v1/chat/completions`` are worded."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from radixkv.frontend.api.openai.schema import ChatRequest
from radixkv.frontend.choice_stream import Piece
from radixkv.frontend.logprobs import ShowToken, chat_logprobs, chat_token
from radixkv.frontend.prompt_logprobs import ScoredPrompt
from radixkv.wire import unpack_tokens


class ChatShape:
    """OpenAI's ``chat.completion`` and ``chat.completion.chunk`` objects."""

    def __init__(self, request: ChatRequest, model: str) -> None:
        self._request = request
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    @property
    def show(self) -> ShowToken:
        """Makes what a choice shows of a token."""
        return chat_token

    def whole(self, pieces: Sequence[Piece], prompts: Sequence[ScoredPrompt]) -> dict[str, Any]:
        """The whole reply, from the answers in order."""
        reply: dict[str, Any] = {**self._head, "object": "chat.completion"}
        reply["choices"] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": piece.text, "refusal": None},
                **self._end(piece),
            }
            for index, piece in enumerate(pieces)
        ]
        (prompt,) = prompts
        if prompt.entries is not None:
            reply["prompt_logprobs"] = prompt.entries
        return reply | self._prompt_ids(prompt)

    @property
    def chunk_head(self) -> dict[str, Any]:
        """What every chunk of a stream begins with."""
        return {**self._head, "object": "chat.completion.chunk"}

    def chunks(
        self, index: int, piece: Piece, prompt: ScoredPrompt, *, is_first: bool
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """What a choice of a stream gained, and what is beside it; the first chunk has the role alone."""
        gained: dict[str, Any] = {"index": index, "delta": {"content": piece.text}, **self._end(piece)}
        if not is_first:
            return [(gained, {})]
        role = {"role": "assistant", "content": ""}
        begin = {"index": index, "delta": role, "logprobs": None, "finish_reason": None}
        return [(begin, self._prompt_ids(prompt)), (gained, {})]

    def _end(self, piece: Piece) -> dict[str, Any]:
        """What follows a choice's text."""
        end: dict[str, Any] = {
            "logprobs": chat_logprobs(piece.logprobs) if self._request.logprobs else None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._request.return_token_ids:
            end["token_ids"] = piece.token_ids
        return end

    def _prompt_ids(self, prompt: ScoredPrompt) -> dict[str, Any]:
        if not self._request.return_token_ids:
            return {}
        return {"prompt_token_ids": unpack_tokens(prompt.prompt.tokens)}
