"""HTTP bodies of completion requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from radixkv.bench.load.prompt_encoder import PromptEncoder
from radixkv.bench.session import BenchRequest
from radixkv.errors import InvalidRequest


@dataclass(frozen=True)
class PreparedRequest:
    """A request with the path and body to send."""

    request: BenchRequest
    path: str = ""
    body: bytes = b""
    error: str | None = None
    """Why the request cannot be sent. None: it can."""


@dataclass(frozen=True)
class RequestBuilder:
    """Builds the bodies of requests."""

    model: str
    encoder: PromptEncoder | None = None
    """Encodes prompts to token ids. None: prompts are sent as they are."""
    has_extensions: bool = True
    """Whether bodies have ``ignore_eos`` and ``return_token_ids``, which are no fields of OpenAI's API."""

    def build(self, requests: Sequence[BenchRequest]) -> list[PreparedRequest]:
        """Builds the paths and bodies of requests. O(length of the prompts).

        Raises:
            CheckpointError: a chat is to be encoded, and there is no chat template.
        """
        return [self._build_one(request) for request in requests]

    def _build_one(self, request: BenchRequest) -> PreparedRequest:
        try:
            encoded = request if self.encoder is None else self.encoder.encode(request)
        except InvalidRequest as error:
            return PreparedRequest(request, error=str(error))
        is_chat = isinstance(encoded.prompt, list)
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        return PreparedRequest(
            request, path, msgspec.json.encode(self._body(encoded, "messages" if is_chat else "prompt"))
        )

    def _body(self, request: BenchRequest, prompt_field: str) -> dict[str, Any]:
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
