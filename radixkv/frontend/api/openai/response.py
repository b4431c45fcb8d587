"""The reply to one request: tokens in, OpenAI's objects out, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from radixkv.frontend.api.openai.schema import GenerationRequest
from radixkv.frontend.choice_stream import Choice, Piece
from radixkv.frontend.client import Client
from radixkv.frontend.http.sse import EVENT_END, EVENT_START
from radixkv.frontend.in_flight import Delta, Prompt, is_long, is_much, without_answer
from radixkv.frontend.logprobs import ShowToken
from radixkv.frontend.prompt_logprobs import ScoredPrompt
from radixkv.frontend.served_model import Served

_REPEATED_A_TOKEN = 16
"""Tokens of a repeated prompt that take as long as one of an answer."""


Chunk = tuple[dict[str, Any], dict[str, Any]]
"""A choice, and what the chunk has beside it."""


class Shape(Protocol):
    """How one endpoint words its replies; usage is added to what it makes."""

    @property
    def show(self) -> ShowToken:
        """Makes what a choice shows of a token."""
        ...

    def whole(self, pieces: Sequence[Piece], prompts: Sequence[ScoredPrompt]) -> dict[str, Any]:
        """The whole reply, from the answers in order."""
        ...

    @property
    def chunk_head(self) -> dict[str, Any]:
        """What every chunk of a stream begins with."""
        ...

    def chunks(self, index: int, piece: Piece, prompt: ScoredPrompt, *, is_first: bool) -> list[Chunk]:
        """The chunks that tell what one choice of a stream gained."""
        ...


class ChunkEvents:
    """The events of one stream. What all chunks have in common is encoded once, as most of them are short.

    Args:
        head: the fields that each begins with.
    """

    def __init__(self, head: dict[str, Any]) -> None:
        self._start = EVENT_START + msgspec.json.encode(head)[:-1] + b',"choices":'

    def event(self, choices: Sequence[dict[str, Any]], more: dict[str, Any]) -> bytes:
        """The event of a chunk that has these choices, and more fields after them."""
        rest = b"," + msgspec.json.encode(more)[1:] if more else b"}"
        return self._start + msgspec.json.encode(choices) + rest + EVENT_END


class Reply:
    """Use either ``whole`` or ``events``, once.

    Args:
        request: what is asked.
        shape: the endpoint's.
        served: what is served.
        prompts: made of the request.
        echoed: the prompts' texts, if choices begin with them.
        arrived: when the request came, in monotonic seconds.
    """

    def __init__(
        self,
        request: GenerationRequest,
        shape: Shape,
        served: Served,
        prompts: Sequence[Prompt],
        *,
        echoed: Sequence[str] | None = None,
        arrived: float,
    ) -> None:
        self._request = request
        self._shape = shape
        self._arrived = arrived
        self._n = request.n_choices
        self._n_prompt = sum(len(prompt.tokens) // 4 for prompt in prompts)
        self._n_cached, self._n_done = 0, 0
        show = shape.show if prompts[0].sampling.logprobs is not None else None
        self._prompts = [
            ScoredPrompt(
                prompt,
                served,
                n_entries=request.prompt_logprobs,
                echo="" if echoed is None else echoed[place],
                show=None if echoed is None else show,
            )
            for place, prompt in enumerate(prompts)
        ]
        self._choices = [
            Choice(prompt.prompt.sampling, served, show, len(prompt.echo))
            for prompt in self._prompts
            for _ in range(self._n)
        ]

    async def whole(self, client: Client) -> bytes:
        """The whole reply's JSON. Raises ``RequestError``; leaving it cancels the request."""
        gathered = [Piece() for _ in self._choices]
        async with aclosing(self._pieces(client, streams=False)) as pieces:
            async for index, piece, _ in pieces:
                gathered[index].add(piece)
        if is_much(self._n_worded(gathered), self._n_figures(gathered)):
            return await asyncio.to_thread(self._worded, gathered)
        return self._worded(gathered)

    async def events(self, client: Client) -> AsyncGenerator[bytes, None]:
        """Server-sent events, without the final one. Raises ``RequestError``; closing it cancels the request."""
        events = ChunkEvents(self._shape.chunk_head)
        async with aclosing(self._pieces(client, streams=True)) as pieces:
            async for index, piece, is_first in pieces:
                prompt = self._prompts[index // self._n]
                chunks = self._shape.chunks(index, piece, prompt, is_first=is_first)
                usage = self._usage_of_chunk()
                yield b"".join([events.event([choice], more | usage) for choice, more in chunks])
        last = {"usage": self._usage()} if self._request.includes_usage else {}
        last |= self._details()
        if last:
            yield events.event([], last)

    async def _pieces(self, client: Client, *, streams: bool) -> AsyncGenerator[tuple[int, Piece, bool], None]:
        """A choice's index, what it gained, and whether that is the first."""
        begun: set[int] = set()
        prompts = [prompt.prompt for prompt in self._prompts]
        batch = client.batch(prompts, arrived=self._arrived, streams=streams)
        async with batch, aclosing(batch.deltas()) as deltas:
            async for delta in deltas:
                index = delta.prompt * self._n + delta.choice
                choice = self._choices[index]
                if is_long(delta):
                    piece = await asyncio.to_thread(self._take, delta, choice)
                else:
                    piece = self._take(delta, choice)
                if piece.finish_reason is not None:
                    batch.end(delta, piece.finish_reason)
                if piece.is_empty:
                    continue
                is_first = index not in begun
                if is_first:
                    begun.add(index)
                    beginning = self._prompts[delta.prompt].beginning
                    beginning.add(piece)
                    piece = beginning
                yield index, piece, is_first

    def _n_worded(self, gathered: Sequence[Piece]) -> int:
        """Tokens in the whole reply, fewer for those of repeated prompts."""
        n_repeated = self._n * self._n_prompt if self._request.echo or self._request.return_token_ids else 0
        return n_repeated // _REPEATED_A_TOKEN + sum(len(piece.token_ids) for piece in gathered)

    def _n_figures(self, gathered: Sequence[Piece]) -> int:
        n_entries = sum(len(prompt.entries or ()) for prompt in self._prompts)
        return n_entries + sum(len(piece.logprobs) for piece in gathered)

    def _worded(self, gathered: Sequence[Piece]) -> bytes:
        reply = self._shape.whole(gathered, self._prompts)
        return msgspec.json.encode({**reply, "usage": self._usage(), **self._details()})

    def _take(self, delta: Delta, choice: Choice) -> Piece:
        if delta.done is not None:
            self._n_cached += delta.done.n_cached_tokens
            self._n_done += 1
        if delta.prompt_logprobs:
            self._prompts[delta.prompt].absorb(delta.prompt_logprobs)
        if self._request.is_only_echo:
            delta = without_answer(delta)
        return choice.absorb(delta)

    def _usage(self) -> dict[str, Any]:
        """So far; what came from the cache is known at the end only."""
        n_answer = sum(choice.n_tokens for choice in self._choices)
        usage: dict[str, Any] = {
            "prompt_tokens": self._n_prompt,
            "completion_tokens": n_answer,
            "total_tokens": self._n_prompt + n_answer,
        }
        if self._n_done == len(self._prompts):
            usage["prompt_tokens_details"] = {"cached_tokens": self._n_cached}
        return usage

    def _usage_of_chunk(self) -> dict[str, Any]:
        if self._request.repeats_usage:
            return {"usage": self._usage()}
        return {"usage": None} if self._request.includes_usage else {}

    def _details(self) -> dict[str, Any]:
        """SGLang's, if they are asked for."""
        if not self._request.return_cached_tokens_details:
            return {}
        return {"sglext": {"cached_tokens_details": {"device": self._n_cached, "host": 0, "storage": 0}}}
