"""Requests as they are posted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from radixkv.bench.load.prompt_encoder import PromptEncoder
from radixkv.bench.session import Request
from radixkv.errors import InvalidRequest


@dataclass(frozen=True)
class Post:
    """A request that is ready to be sent."""

    request: Request
    path: str = ""
    body: bytes = b""
    error: str | None = None
    """Why it cannot be sent, if so."""


@dataclass(frozen=True)
class Wording:
    """How requests are put."""

    model: str
    encoder: PromptEncoder | None = None
    """Makes token ids of prompts; None: they are sent as they are."""
    has_extensions: bool = True
    """Whether with ``ignore_eos`` and ``return_token_ids``, which are not OpenAI's; many servers know them."""

    def posts(self, requests: Sequence[Request]) -> list[Post]:
        """The requests, ready to be sent. O(their length).

        Raises:
            CheckpointError: there are chats to encode, and no chat template.
        """
        return [self._post(request) for request in requests]

    def _post(self, request: Request) -> Post:
        try:
            encoded = request if self.encoder is None else self.encoder.encode(request)
        except InvalidRequest as error:
            return Post(request, error=str(error))
        is_chat = isinstance(encoded.prompt, list)
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        return Post(request, path, msgspec.json.encode(self._body(encoded, "messages" if is_chat else "prompt")))

    def _body(self, request: Request, prompt_field: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            prompt_field: request.prompt,
            "max_tokens": request.output_len,
            "temperature": request.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.has_extensions:
            body |= {"ignore_eos": True, "return_token_ids": True}
        if request.n != 1:
            body["n"] = request.n
        if request.seed is not None:
            body["seed"] = request.seed
        return body
