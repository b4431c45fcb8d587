"""How replies of ``/v1/completions`` are worded."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from radixkv.frontend.api.openai.schema import CompletionRequest
from radixkv.frontend.choice_stream import Piece
from radixkv.frontend.logprobs import ShowToken, completion_logprobs, completion_token
from radixkv.frontend.prompt_logprobs import ScoredPrompt
from radixkv.wire import unpack_tokens


class CompletionShape:
    """OpenAI's ``text_completion`` objects; those of a stream and of a whole reply look alike."""

    def __init__(self, request: CompletionRequest, model: str) -> None:
        self._request = request
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def show(self) -> ShowToken:
        """Makes what a choice shows of a token."""
        return completion_token

    def whole(self, pieces: Sequence[Piece], prompts: Sequence[ScoredPrompt]) -> dict[str, Any]:
        """The whole reply, from the answers in order."""
        n = self._request.n_choices
        choices = [
            self._choice(index, piece, prompts[index // n], is_first=True) for index, piece in enumerate(pieces)
        ]
        return {**self._head, "choices": choices}

    @property
    def chunk_head(self) -> dict[str, Any]:
        """What every chunk of a stream begins with."""
        return self._head

    def chunks(
        self, index: int, piece: Piece, prompt: ScoredPrompt, *, is_first: bool
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The one chunk that tells what a choice of a stream gained: its choice, and nothing beside it."""
        return [(self._choice(index, piece, prompt, is_first=is_first), {})]

    def _choice(self, index: int, piece: Piece, prompt: ScoredPrompt, *, is_first: bool) -> dict[str, Any]:
        has_logprobs = self._request.n_logprobs is not None
        choice: dict[str, Any] = {
            "index": index,
            "text": piece.text,
            "logprobs": completion_logprobs(piece.logprobs) if has_logprobs else None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if prompt.entries is not None:
            choice["prompt_logprobs"] = prompt.entries
        if self._request.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if is_first:
                # Encoded alone, as encoding lets no other thread run before it is done.
                choice["prompt_token_ids"] = msgspec.Raw(msgspec.json.encode(unpack_tokens(prompt.prompt.tokens)))
        return choice
