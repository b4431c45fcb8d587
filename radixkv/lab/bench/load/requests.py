"""Building of sessions' HTTP requests, ahead of when they are due."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from radixkv.errors import CheckpointError, ConfigError, InvalidRequest
from radixkv.lab.bench.session import BenchRequest, Session, Turns
from radixkv.text.chat_messages import normalize_messages
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer


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
            ConfigError: as ``PromptEncoder.encode``.
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
            body |= {"return_token_ids": True} | ({"ignore_eos": True} if request.ignore_eos else {})
        if request.tools:
            body["tools"] = request.tools
        if request.temperature > 0:
            body["top_p"] = 1.0  # otherwise the default is that of the checkpoint's generation_config.json
        if request.n != 1:
            body["n"] = request.n
        if request.seed is not None:
            body["seed"] = request.seed
        return body


class PromptEncoder:
    """Encodes prompts as ``radixkv serve`` does.

    Args:
        folder: a checkpoint's folder with ``tokenizer.json`` and, for chats, a chat template.

    Raises:
        CheckpointError: the tokenizer is missing or cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer = Tokenizer.load(folder)
        self._template = ChatTemplate.load(folder)

    def encode(self, request: BenchRequest) -> BenchRequest:
        """Returns the request with token ids as its prompt. O(length).

        Raises:
            InvalidRequest: the prompt has a lone surrogate, or the chat template rejects the messages.
            CheckpointError: the prompt is a chat and the folder has no chat template.
            ConfigError: the request has tools, whose calls servers find in the answers to chats only.
        """
        prompt = request.prompt
        if request.tools:
            raise ConfigError(
                "a workload with tools cannot be sent as token ids: servers find tool calls in the answers to "
                "chats only; leave out --prompt-form tokens"
            )
        if isinstance(prompt, tuple):
            return request
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(prompt)
        elif self._template is None:
            raise CheckpointError(f"{self._folder} has no chat template to encode chats with; send them as texts")
        else:
            text = self._template.render(normalize_messages(prompt))
            ids = self._tokenizer.encode(text, adds_special_tokens=False)
        return replace(request, prompt=struct.unpack(f"<{len(ids) // 4}i", ids))


MAX_PREFETCHED_BYTES = 1 << 26
"""Limit of the prepared bodies; the prompts themselves take several times as much memory."""


@dataclass(frozen=True)
class PreparedSession:
    """A session whose first turn is ready to be sent."""

    turns: Turns
    requests: list[PreparedRequest]
    """The requests of the first turn."""

    @property
    def n_bytes(self) -> int:
        return sum(len(request.body) for request in self.requests)


class SessionPrefetcher:
    """Hands out sessions in order, each with its first turn prepared.

    Args:
        sessions: the sessions in the order in which they start.
        builder: builds the bodies of their requests.
    """

    def __init__(self, sessions: Sequence[Session], builder: RequestBuilder) -> None:
        self._upcoming = iter(sessions)
        self._builder = builder
        self._prepared: deque[PreparedSession] = deque()
        self._n_bytes = 0

    async def fill(self) -> None:
        """Prepares sessions up to ``MAX_PREFETCHED_BYTES``. O(length of their prompts)."""
        while self._n_bytes < MAX_PREFETCHED_BYTES and self._prepare_next():
            await asyncio.sleep(0)  # lets Ctrl-C cancel the run

    def refill(self) -> None:
        """Prepares the next session unless ``MAX_PREFETCHED_BYTES`` are prepared."""
        if self._n_bytes < MAX_PREFETCHED_BYTES:
            self._prepare_next()

    def take(self) -> PreparedSession:
        """Returns the next session; there must be one."""
        if not self._prepared:
            self._prepare_next()
        session = self._prepared.popleft()
        self._n_bytes -= session.n_bytes
        return session

    def close(self) -> None:
        """Closes the sessions that were not taken."""
        for session in self._prepared:
            session.turns.close()

    def _prepare_next(self) -> bool:
        session = next(self._upcoming, None)
        if session is None:
            return False
        turns = session.turns()
        prepared = PreparedSession(turns, self._builder.build(next(turns, ())))
        self._prepared.append(prepared)
        self._n_bytes += prepared.n_bytes
        return True
