"""One completion request being answered: tokens in, OpenAI's objects out, whole or as a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from radixkv.errors import RequestError
from radixkv.frontend.client import Batch, Client, Delta, Prompt
from radixkv.frontend.failure import error_body
from radixkv.frontend.openai import Served
from radixkv.frontend.schema import CompletionRequest
from radixkv.text.answer import AnswerText
from radixkv.wire import unpack_tokens

DONE_EVENT = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def error_event(error: RequestError) -> bytes:
    """A failure in the middle of a stream."""
    return event(error_body(error))


@dataclass(frozen=True)
class Piece:
    """What one choice gained."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    """The stop string, or the token of ``stop_token_ids``, that ended it."""


@dataclass
class Choice:
    """The answer to one prompt so far."""

    prompt: Prompt
    text: AnswerText | None
    """None: without a tokenizer an answer has token ids only."""
    eos_token_ids: frozenset[int]
    """Tokens that end the answer though nobody asked for it."""
    is_stopped: bool = False
    """Whether a stop string ended it; what still comes is dropped."""
    n_tokens: int = 0
    n_cached: int = 0

    def absorb(self, delta: Delta) -> Piece:
        """Takes what came. Token by token, so that the end does not depend on how many came together."""
        was_stopped = self.is_stopped
        ids: list[int] = []
        text = ""
        for token in unpack_tokens(delta.tokens):
            if self.is_stopped:
                break
            ids.append(token)
            if self.text is not None and not self._is_hidden(token):
                more, self.is_stopped = self.text.push([token])
                text += more
        self.n_tokens += len(ids)
        done = delta.done
        if done is not None:
            self.n_cached = done.n_cached_tokens
        if was_stopped:
            return Piece(delta.index, "", [], None)
        if done is not None and self.text is not None and not self.is_stopped:
            more, self.is_stopped = self.text.finish()
            text += more
        if self.is_stopped and self.text is not None:
            return Piece(delta.index, text, ids, "stop", self.text.stop_string)
        if done is None:
            return Piece(delta.index, text, ids, None)
        is_asked = done.stop_token_id in self.prompt.sampling.stop_token_ids
        is_reason = is_asked and done.stop_token_id not in self.eos_token_ids
        return Piece(delta.index, text, ids, done.finish_reason, done.stop_token_id if is_reason else None)

    def _is_hidden(self, token: int) -> bool:
        """Whether a token ends the answer, and is no part of its text."""
        return token in self.eos_token_ids or token in self.prompt.sampling.stop_token_ids


@dataclass
class _Text:
    """What a choice of a whole reply has gathered."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Completion:
    """The reply to one request. Use either ``whole`` or ``events``, once."""

    def __init__(
        self, request: CompletionRequest, served: Served, prompts: Sequence[Prompt], *, arrived: float
    ) -> None:
        self._request = request
        self._arrived = arrived
        self._prompts = prompts
        self._choices = [_choice(prompt, served) for prompt in prompts]
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
        }

    async def whole(self, client: Client) -> dict[str, Any]:
        """The whole reply. Raises ``RequestError``; leaving it cancels the request."""
        gathered = [_Text() for _ in self._choices]
        async with (
            client.batch(self._prompts, arrived=self._arrived) as batch,
            aclosing(self._pieces(batch)) as pieces,
        ):
            async for piece in pieces:
                part = gathered[piece.index]
                part.text.append(piece.text)
                part.token_ids += piece.token_ids
                if piece.finish_reason is not None:
                    part.finish_reason, part.stop_reason = piece.finish_reason, piece.stop_reason
        choices = [
            self._object(
                Piece(index, "".join(part.text), part.token_ids, part.finish_reason, part.stop_reason),
                has_prompt=True,
            )
            for index, part in enumerate(gathered)
        ]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self, client: Client) -> AsyncGenerator[bytes, None]:
        """Server-sent events, without the final one. Raises ``RequestError``; closing it cancels the request."""
        begun: set[int] = set()
        usage = {"usage": None} if self._request.includes_usage else {}
        async with (
            client.batch(self._prompts, arrived=self._arrived) as batch,
            aclosing(self._pieces(batch)) as pieces,
        ):
            async for piece in pieces:
                if piece.token_ids or piece.finish_reason is not None:
                    choice = self._object(piece, has_prompt=piece.index not in begun)
                    begun.add(piece.index)
                    yield event({**self._head, "choices": [choice], **usage})
        if self._request.includes_usage:
            yield event({**self._head, "choices": [], "usage": self._usage()})

    async def _pieces(self, batch: Batch) -> AsyncGenerator[Piece, None]:
        async with aclosing(batch.deltas()) as deltas:
            async for delta in deltas:
                choice = self._choices[delta.index]
                was_stopped = choice.is_stopped
                piece = choice.absorb(delta)
                if choice.is_stopped and not was_stopped:
                    batch.complete(delta.index)
                yield piece

    def _object(self, piece: Piece, *, has_prompt: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": piece.index,
            "text": piece.text,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if has_prompt:
                choice["prompt_token_ids"] = unpack_tokens(self._prompts[piece.index].tokens)
        return choice

    def _usage(self) -> dict[str, Any]:
        n_prompt = sum(len(prompt.tokens) // 4 for prompt in self._prompts)
        n_answer = sum(choice.n_tokens for choice in self._choices)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_answer,
            "total_tokens": n_prompt + n_answer,
            "prompt_tokens_details": {"cached_tokens": sum(choice.n_cached for choice in self._choices)},
        }


def _choice(prompt: Prompt, served: Served) -> Choice:
    sampling = prompt.sampling
    return Choice(
        prompt=prompt,
        text=None if served.tokenizer is None else AnswerText(served.tokenizer, sampling.stop),
        eos_token_ids=frozenset() if sampling.ignore_eos else served.eos_token_ids,
    )
