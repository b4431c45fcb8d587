"""Responses of OpenAI's endpoints, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple

import msgspec

from radixkv.frontend.answers import Answers, PartSink
from radixkv.frontend.api.openai.chat_format import ChatFormat
from radixkv.frontend.api.openai.completion_format import CompletionFormat
from radixkv.frontend.api.openai.logprobs import RenderedToken
from radixkv.frontend.api.openai.prompt_logprobs import PromptWithLogprobs
from radixkv.frontend.api.openai.schema import ChatRequest, GenerationRequest
from radixkv.frontend.api.openai.translation import format_field
from radixkv.frontend.arrival import Arrival
from radixkv.frontend.chat import ChatPrompt
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.http.sse import EVENT_END, EVENT_START
from radixkv.frontend.in_flight import TokenDelta, exceeds_inline_work
from radixkv.frontend.miss_report import cached_fields
from radixkv.frontend.stored_prompts import stored_fields
from radixkv.generation.models import GenerationModel
from radixkv.generation.output import OutputDelta
from radixkv.generation.parts import TextPart
from radixkv.wire.cache_use import CacheUse
from radixkv.wire.messages import CacheMiss, Done, DraftUse, KVEvictionUse, Submit

_REPEATED_TOKENS_PER_TOKEN = 16
"""Tokens of a repeated prompt that take as long to render as one token of an answer."""
_TEXT_MARK, _ID_MARK = "\0", -1
"""Text and token id that mark their places in an encoded choice."""


class TextEvents(NamedTuple):
    """Encoder of the events of one choice that differ only by text and token ids: most events of a stream.

    Encoding the whole event takes several times as long.
    """

    start: bytes
    """What stands before the text."""
    middle: bytes
    """What stands between the text and the ids."""
    end: bytes
    """What stands after the ids."""
    has_ids: bool

    def event(self, text: str, token_ids: Sequence[int]) -> bytes:
        """Returns the event with this text and these ids."""
        ids = msgspec.json.encode(token_ids) if self.has_ids else b""
        return b"".join((self.start, msgspec.json.encode(text), self.middle, ids, self.end))


class ChunkEvents:
    """Encoder of one stream's events.

    It encodes the fields that all chunks share once, because most chunks have little else.

    Args:
        head: the fields that every chunk begins with.
        tail: the fields that a chunk ends with, if it has no others after its choices.
    """

    def __init__(self, head: dict[str, Any], tail: dict[str, Any]) -> None:
        self._start = EVENT_START + msgspec.json.encode(head)[:-1] + b',"choices":'
        self._end = _rest(tail)

    def event(self, choices: Sequence[dict[str, Any]], more: dict[str, Any]) -> bytes:
        """Returns the event of a chunk with these choices, and fields after them in place of the tail."""
        return self._start + msgspec.json.encode(choices) + (_rest(more) if more else self._end)

    def text_events(self, chunk: Callable[[OutputDelta[Any]], dict[str, Any]]) -> TextEvents:
        """Returns the encoder of the events of one choice that have only text, and the tail.

        Args:
            chunk: returns the choice of a chunk with some output.
        """
        choice = msgspec.json.encode(chunk(OutputDelta([TextPart(_TEXT_MARK)], [_ID_MARK])))
        start, _, rest = choice.partition(msgspec.json.encode(_TEXT_MARK))
        middle, ids, end = rest.rpartition(msgspec.json.encode([_ID_MARK]))
        if not ids:
            middle, end = rest, b""
        return TextEvents(self._start + b"[" + start, middle, end + b"]" + self._end, has_ids=bool(ids))


def _rest(fields: dict[str, Any]) -> bytes:
    """Returns the end of an event, from the comma before these fields on."""
    return (b"," + msgspec.json.encode(fields)[1:] if fields else b"}") + EVENT_END


class ResponseWriter:
    """Runs one request and writes its response. Use either ``whole`` or ``events``, once.

    Args:
        request: the parsed body.
        response_format: gives the JSON of the endpoint.
        model: ends answers and turns them into text.
        prompts: the encoded prompts of the request.
        client: runs them.
        echoed: the prompts' texts, if choices begin with them.
        chat: the only prompt, if it is a chat's.
        arrived: when and where the request arrived.
    """

    def __init__(
        self,
        request: GenerationRequest,
        response_format: ChatFormat | CompletionFormat,
        model: GenerationModel,
        prompts: Sequence[Submit],
        client: EngineClient,
        *,
        echoed: Sequence[str] | None = None,
        chat: ChatPrompt | None = None,
        arrived: Arrival,
    ) -> None:
        self._request = request
        self._format = response_format
        self._n = request.n_choices
        self._n_prompt = sum(len(prompt.tokens) // 4 for prompt in prompts)
        self._cache_use, self._n_done = CacheUse(), 0
        self._drafts: DraftUse | None = None
        """Sum over all prompts; None without speculative decoding."""
        self._kv_eviction: KVEvictionUse | None = None
        """Sum over all prompts; None without a ``kv_budget``."""
        self._n_lost = 0
        self._miss: CacheMiss | None = None
        """The miss of the prompt with the most computed tokens, of which there were ``_n_lost``."""
        self._model = model
        render_token = response_format.render_token if prompts[0].sampling.logprobs is not None else None
        self._prompts = [
            PromptWithLogprobs(
                prompt,
                model,
                n_top=request.prompt_logprobs,
                echo=None if echoed is None else echoed[index],
                render_token=render_token,
                chat=chat,
                generates=not (request.is_only_echo or request.is_for_cache),
                is_for_cache=request.is_for_cache,
            )
            for index, prompt in enumerate(prompts)
        ]
        self._answers = Answers(self._prompts, client, arrived, format_field(request))
        self._choices = [choice for prompt in self._prompts for choice in prompt.choices]
        self._events = ChunkEvents(response_format.chunk_head, self._usage_of_chunk())
        self._begun: set[int] = set()
        """The choices that have output, by their index among all."""
        self._text_events: dict[int, TextEvents] = {}
        """Encoders of events of these choices that have only text."""

    async def whole(self) -> bytes:
        """Returns the JSON of the whole response. Raises ``RequestError``; cancelling it cancels the request."""
        gathered: list[OutputDelta[RenderedToken]] = [OutputDelta() for _ in self._choices]
        async with aclosing(self._answers.deltas_and_outputs(streams=False)) as outputs:
            async for delta, output in outputs:
                if delta.done is not None:
                    self._count(delta.done)
                if not output.is_empty:
                    index = delta.prompt * self._n + delta.choice
                    gathered[index].add(self._with_prefix(index, output)[0])
        if exceeds_inline_work(self._n_rendered_tokens(gathered), self._n_logprobs(gathered)):
            return await asyncio.to_thread(self._render_all, gathered)
        return self._render_all(gathered)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the stream's events but ``[DONE]``. Raises ``RequestError``; closing it cancels the request."""
        has_ended = False
        async with aclosing(self._answers.deltas_and_outputs(streams=True)) as outputs:
            async for delta, output in outputs:
                part = self._part(delta, output)
                if part and self._n_done == len(self._prompts):  # with the last output, so that both are one write
                    part += self._last_event()
                    has_ended = True
                if part:
                    yield part
        if not has_ended and (last_event := self._last_event()):
            yield last_event

    def write_directly(self, sink: PartSink) -> None:
        """See ``AnswerWriter.write_directly``."""
        self._answers.write_directly(sink, self._part)

    def _part(self, delta: TokenDelta, output: OutputDelta[RenderedToken]) -> bytes:
        """Returns the events of one choice's new output; nothing for none."""
        if delta.done is not None:
            self._count(delta.done)
        if output.is_empty:
            return b""
        index, prompt = delta.prompt * self._n + delta.choice, self._prompts[delta.prompt]
        if index in self._begun and (text := output.only_text) is not None and not self._request.repeats_usage:
            if (events := self._text_events.get(index)) is None:
                chunk = partial(self._format.chunk, index, prompt=prompt)
                events = self._text_events[index] = self._events.text_events(chunk)
            return events.event(text, output.token_ids)
        output, is_first = self._with_prefix(index, output)
        mark = self._mark(delta.done)
        return b"".join(
            [
                self._events.event(
                    [choice],
                    mark | (more | self._usage_of_chunk() if more or self._request.repeats_usage else more),
                )
                for choice, more in self._format.chunks(index, output, prompt, is_first=is_first)
            ]
        )

    def _mark(self, done: Done | None) -> dict[str, Any]:
        """Returns how chunks with the end of an approximate answer say so in a stream without a usage."""
        if done is None or done.kv_eviction is None or self._request.includes_usage:
            return {}
        return {"kv_eviction": done.kv_eviction.fields}

    def _last_event(self) -> bytes:
        """Returns the event after all output; nothing if it would be empty."""
        last = {"usage": self._usage()} if self._request.includes_usage else {}
        last |= self._details()
        return self._events.event([], last) if last else b""

    def _with_prefix(
        self, index: int, output: OutputDelta[RenderedToken]
    ) -> tuple[OutputDelta[RenderedToken], bool]:
        """Returns new output of a choice and whether it is the first, which then begins with the prompt's part."""
        if index in self._begun:
            return output, False
        self._begun.add(index)
        prefix_output = self._prompts[index // self._n].prefix_output
        prefix_output.add(output)
        return prefix_output, True

    def _n_rendered_tokens(self, gathered: Sequence[OutputDelta[RenderedToken]]) -> int:
        """Returns the tokens to render for a whole response; repeated prompt tokens count a fraction."""
        n_repeated = self._n * self._n_prompt if self._request.echo or self._request.return_token_ids else 0
        return n_repeated // _REPEATED_TOKENS_PER_TOKEN + sum(len(output.token_ids) for output in gathered)

    def _n_logprobs(self, gathered: Sequence[OutputDelta[RenderedToken]]) -> int:
        n_top = sum(len(prompt.entries or ()) for prompt in self._prompts)
        return n_top + sum(len(output.logprobs) for output in gathered)

    def _render_all(self, gathered: Sequence[OutputDelta[RenderedToken]]) -> bytes:
        response = self._format.whole(gathered, self._prompts)
        return msgspec.json.encode({**response, "usage": self._usage(), **self._details()})

    def _count(self, done: Done) -> None:
        self._cache_use += done.cache_use
        if done.drafts is not None:
            self._drafts = done.drafts + (self._drafts or DraftUse())
        if done.kv_eviction is not None:
            self._kv_eviction = (
                done.kv_eviction if self._kv_eviction is None else self._kv_eviction + done.kv_eviction
            )
        self._n_done += 1
        n_lost = done.n_prompt_tokens - done.cache_use.n_cached
        if done.miss is not None and n_lost > self._n_lost:
            self._n_lost, self._miss = n_lost, done.miss

    def _usage(self) -> dict[str, Any]:
        """Returns the usage so far; cached tokens and drafts are known only when all prompts are done."""
        n_answer = sum(choice.n_tokens for choice in self._choices)
        usage: dict[str, Any] = {
            "prompt_tokens": self._n_prompt,
            "completion_tokens": n_answer,
            "total_tokens": self._n_prompt + n_answer,
        }
        details: dict[str, int] = {}
        if isinstance(self._request, ChatRequest):
            details["reasoning_tokens"] = sum(choice.n_reasoning_tokens for choice in self._choices)
        if self._drafts is not None and self._n_done == len(self._prompts):
            details["accepted_prediction_tokens"] = self._drafts.n_accepted
            details["rejected_prediction_tokens"] = self._drafts.n_rejected
        if details:
            usage["completion_tokens_details"] = details
        if self._kv_eviction is not None and self._n_done == len(self._prompts):
            usage["kv_eviction"] = self._kv_eviction.fields
        if self._n_done == len(self._prompts):
            miss = self._miss if self._request.explain_cache else None
            usage["prompt_tokens_details"] = cached_fields(
                self._cache_use, miss, self._model.ready, self._model.tokenizer
            )
            usage["prompt_tokens_details"] |= stored_fields(
                [prompt.stored for prompt in self._prompts], self._model.ready
            )
        return usage

    def _usage_of_chunk(self) -> dict[str, Any]:
        if self._request.repeats_usage:
            return {"usage": self._usage()}
        return {"usage": None} if self._request.includes_usage else {}

    def _details(self) -> dict[str, Any]:
        """Returns SGLang's extension fields, if the request asks for them."""
        if not self._request.return_cached_tokens_details or self._n_done < len(self._prompts):
            return {}
        by_source = self._cache_use.by_source(has_disk=self._model.ready.has_disk)
        return {"sglext": {"cached_tokens_details": by_source}}
