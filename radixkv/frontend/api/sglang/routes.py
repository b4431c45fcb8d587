"""SGLang's ``/generate``."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from radixkv.frontend.api.sglang.logprobs import (
    AnswerFigures,
    PromptFigures,
    show_with_text,
    show_without_text,
)
from radixkv.frontend.api.sglang.prompts import Asked, asked_prompts
from radixkv.frontend.api.sglang.schema import GenerateRequest, parse_generate
from radixkv.frontend.choice_stream import Choice, Piece
from radixkv.frontend.client import Batch, Client
from radixkv.frontend.http.body import Bodies
from radixkv.frontend.http.disconnect import unless_gone
from radixkv.frontend.http.route import route
from radixkv.frontend.http.sse import EventStream, event
from radixkv.frontend.in_flight import Delta, is_long, without_answer
from radixkv.frontend.logprobs import ShowToken
from radixkv.frontend.served_model import Served


def generate_routes(client: Client, served: Served, bodies: Bodies) -> list[Route]:
    """``/generate``."""

    async def generate(request: Request) -> Response:
        arrived = time.monotonic()
        body = await bodies.read(request, parse_generate, served.max_prompt_and_answer)
        asked = await unless_gone(request.receive, asked_prompts(body, served))
        generation = Generation(body, asked, served, arrived=arrived)
        if body.stream:
            return EventStream(generation.events(client))
        reply = await unless_gone(request.receive, generation.whole(client))
        return Response(msgspec.json.encode(reply), media_type="application/json")

    return [route("/generate", generate, "POST", "PUT")]


@dataclass
class _Part:
    """One answer so far."""

    place: int
    """Among all answers of the request."""
    id: str
    asked: Asked
    choice: Choice
    figures: AnswerFigures | None
    """None if they are not asked for."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: dict[str, Any] | None = None

    def absorb(self, delta: Delta) -> bool:
        """Takes what came; whether there is something to tell."""
        gained = self.choice.absorb(delta)
        self.text += gained.text
        self.token_ids += gained.token_ids
        if self.figures is not None:
            self.figures.absorb(gained)
        if gained.finish_reason is not None:
            self.finish = self._finish(gained, delta)
        return not gained.is_empty

    def _finish(self, gained: Piece, delta: Delta) -> dict[str, Any]:
        match gained.finish_reason:
            case "length":
                most = self.asked.prompt.sampling.max_tokens if self.asked.wants_answer else 0
                return {"type": "length", "length": most}
            case "stop":
                matched = delta.stop_token_id if gained.stop_reason is None else gained.stop_reason
                return {"type": "stop", "matched": matched}
        return {"type": gained.finish_reason}


class Generation:
    """The reply to one request. Use either ``whole`` or ``events``, once.

    Args:
        request: what is asked.
        asked: its prompts.
        served: what is served.
        arrived: when the request came, in monotonic seconds.
    """

    def __init__(self, request: GenerateRequest, asked: Sequence[Asked], served: Served, *, arrived: float) -> None:
        self._arrived = arrived
        self._prompts = asked
        self._scored = [PromptFigures(one, served.tokenizer) for one in asked]
        places = itertools.count()
        self._parts = [
            [
                _Part(
                    next(places),
                    _id(one, choice),
                    one,
                    Choice(one.prompt.sampling, served, _show(one)),
                    None if one.prompt.sampling.logprobs is None else AnswerFigures(one),
                )
                for choice in range(one.prompt.sampling.n)
            ]
            for one in asked
        ]
        is_list = isinstance(request.text, list) or not isinstance((request.input_ids or [0])[0], int)
        self._is_single = not is_list and len(self._parts[0]) == 1

    async def whole(self, client: Client) -> dict[str, Any] | list[dict[str, Any]]:
        """The whole reply. Raises ``RequestError``; leaving it cancels the request."""
        objects: dict[int, dict[str, Any]] = {}
        async with aclosing(self._objects(client, streams=False)) as found:
            async for part, shown in found:
                objects[part.place] = shown
        return objects[0] if self._is_single else [objects[place] for place in range(len(objects))]

    async def events(self, client: Client) -> AsyncGenerator[bytes, None]:
        """Server-sent events, each with all the text so far. Raises ``RequestError``; closing it cancels."""
        async with aclosing(self._objects(client, streams=True)) as found:
            async for part, shown in found:
                yield event(shown if self._is_single else {**shown, "index": part.place})

    async def _objects(
        self, client: Client, *, streams: bool
    ) -> AsyncGenerator[tuple[_Part, dict[str, Any]], None]:
        """What to tell, and of which answer; last of each the whole of it, once its request has ended."""
        prompts = [one.prompt for one in self._prompts]
        batch = client.batch(prompts, arrived=self._arrived, streams=streams)
        async with batch, aclosing(batch.deltas()) as deltas:
            async for delta in deltas:
                parts, part = self._parts[delta.prompt], self._parts[delta.prompt][delta.choice]
                has_gained = await self._absorb(delta, part, batch)
                if streams and has_gained and part.finish is None:
                    yield part, self._object(delta.prompt, part, None)
                if delta.done is not None:
                    for each in parts:
                        yield each, self._object(delta.prompt, each, delta.done.n_cached_tokens)

    async def _absorb(self, delta: Delta, part: _Part, batch: Batch) -> bool:
        was_ended = part.choice.is_ended
        if is_long(delta):
            has_gained = await asyncio.to_thread(self._take, delta, part)
        else:
            has_gained = self._take(delta, part)
        if part.finish is not None and not was_ended:
            batch.end(delta, part.finish["type"])
        return has_gained

    def _take(self, delta: Delta, part: _Part) -> bool:
        self._scored[delta.prompt].absorb(delta.prompt_logprobs)
        return part.absorb(delta if part.asked.wants_answer else without_answer(delta))

    def _object(self, place: int, part: _Part, n_cached: int | None) -> dict[str, Any]:
        """An answer so far; what came from the cache is known at the end only."""
        meta: dict[str, Any] = {
            "id": part.id,
            "finish_reason": part.finish if n_cached is not None else None,
            "prompt_tokens": len(part.asked.prompt.tokens) // 4,
            "completion_tokens": part.choice.n_tokens,
        }
        if n_cached is not None:
            meta |= {"cached_tokens": n_cached, "e2e_latency": time.monotonic() - self._arrived}
        if part.figures is not None:
            meta |= self._scored[place].shown() | part.figures.shown()
        return {"text": part.text, "output_ids": part.token_ids, "meta_info": meta}


def _show(one: Asked) -> ShowToken | None:
    if one.prompt.sampling.logprobs is None:
        return None
    return show_with_text if one.has_texts else show_without_text


def _id(one: Asked, choice: int) -> str:
    name = one.rid or uuid.uuid4().hex
    return f"{name}_{choice}" if one.rid and one.prompt.sampling.n > 1 else name
