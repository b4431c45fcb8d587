"""Responses of ``/v1/messages``, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec

from radixkv.frontend.answers import PartSink, SingleAnswer
from radixkv.frontend.api.anthropic.diagnostics import diagnostics_field, message_id
from radixkv.frontend.cache_diagnostics.diagnosis import Diagnosis
from radixkv.frontend.http.sse import typed_event
from radixkv.generation.output import OutputDelta
from radixkv.generation.parts import Part, ReasoningPart, TextPart, ToolCallPart, continues, text_of

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter:
    """Runs one request and writes its response. Use either ``whole`` or ``events``, once.

    Args:
        answer: runs the prompt.
        model: the name of the model.
        diagnosis: what to tell of an earlier message; None for nothing.
        explains_cache: whether the usage says why the prompt was not cached further.
        reports_edits: whether the response says which edits of the conversation were made, which is none.
    """

    def __init__(
        self,
        answer: SingleAnswer,
        model: str,
        diagnosis: Diagnosis | None = None,
        *,
        explains_cache: bool = False,
        reports_edits: bool = False,
    ) -> None:
        self._answer = answer
        self._diagnosis = diagnosis
        self._explains_cache = explains_cache or (diagnosis is not None and diagnosis.is_asked)
        self._edits: dict[str, Any] = {"context_management": {"applied_edits": []}} if reports_edits else {}
        self._head = {
            "id": message_id(answer),
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._blocks = _BlockEvents()
        self._has_begun = False
        """Whether the stream has its first event."""
        self._last: OutputDelta[None] = OutputDelta()
        """The output with which the answer ended."""

    async def whole(self) -> bytes:
        """Returns the JSON of the message. Raises ``RequestError``; cancelling it cancels the request."""
        output = await self._answer.whole()
        content = [_block(part, text_of(part)) for part in output.parts]
        end = self._end(output) | {"container": None}
        message = {
            **self._head,
            "content": content,
            **end,
            **self._edits,
            "diagnostics": self._diagnostics(),
            "usage": self._usage_at_end(),
        }
        return msgspec.json.encode(message)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the stream's events. Raises ``RequestError``; closing it cancels the request."""
        async with aclosing(self._answer.nonempty_outputs(streams=True)) as outputs:
            async for output in outputs:
                if part := self._part(output):
                    yield part
        events = [
            *self._blocks.end(),
            {"type": "message_delta", "delta": self._end(self._last), **self._edits, "usage": self._usage_at_end()},
            {"type": "message_stop"},
        ]
        yield b"".join(map(typed_event, events))

    def write_directly(self, sink: PartSink) -> None:
        """See ``AnswerWriter.write_directly``."""
        self._answer.write_directly(sink, self._part)

    def _part(self, output: OutputDelta[None]) -> bytes:
        """Returns the events of new output; nothing for none."""
        events = [] if self._has_begun else [self._start(), {"type": "ping"}]
        self._has_begun = True
        for part in output.parts:
            events += self._blocks.add(part)
        if output.finish_reason is not None:
            self._last = output
        return b"".join(map(typed_event, events))

    def _start(self) -> dict[str, Any]:
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "diagnostics": self._diagnostics(),
            "usage": self._usage(),
        }
        return {"type": "message_start", "message": message}

    def _end(self, output: OutputDelta[None]) -> dict[str, Any]:
        """Returns the fields that say why the message ended."""
        if isinstance(output.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_reason}
        if output.finish_reason == "length" and self._answer.ends_with_context:
            return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
        return {"stop_reason": _STOP_REASONS.get(output.finish_reason or "", "end_turn"), "stop_sequence": None}

    def _diagnostics(self) -> dict[str, Any] | None:
        """Returns ``diagnostics``, once, when the cache was read."""
        if self._diagnosis is None:
            return None
        return diagnostics_field(self._diagnosis.conclude(self._answer.n_cached))

    def _usage_at_end(self) -> dict[str, Any]:
        """Returns the usage, with the miss if the request asks for it."""
        usage: dict[str, Any] = self._usage() | self._answer.stored_fields | self._answer.eviction_fields
        if self._explains_cache and self._answer.cache_miss is not None:
            usage["cache_miss"] = self._answer.cache_miss
        return usage

    def _usage(self) -> dict[str, int]:
        """Returns the usage so far. From the first token on, only the tokens of the answer change."""
        answer = self._answer
        return {
            "input_tokens": answer.n_prompt - answer.n_cached - answer.n_written,
            "cache_creation_input_tokens": answer.n_written,
            "cache_read_input_tokens": answer.n_cached,
            "output_tokens": answer.n_output,
        }


class _BlockEvents:
    """Events about the content of one message. Each part of another kind, or of another call, is a block."""

    def __init__(self) -> None:
        self._index = -1
        self._open: Part | None = None
        """A part of the block that has begun and not ended."""

    def add(self, part: Part) -> Iterator[dict[str, Any]]:
        """Yields the events of a part or a piece of one."""
        if not continues(part, self._open):
            yield from self.end()
            self._index += 1
            self._open = part
            yield {"type": "content_block_start", "index": self._index, "content_block": _block(part, "")}
        if (delta := _delta(part)) is not None:
            yield {"type": "content_block_delta", "index": self._index, "delta": delta}

    def end(self) -> Iterator[dict[str, Any]]:
        """Yields the event that ends the open block, if there is one."""
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = None


def _delta(part: Part) -> dict[str, Any] | None:
    match part:
        case TextPart():
            return {"type": "text_delta", "text": part.text}
        case ReasoningPart():
            return {"type": "thinking_delta", "thinking": part.text}
        case ToolCallPart():
            return {"type": "input_json_delta", "partial_json": part.arguments} if part.arguments else None


def _block(part: Part, text: str) -> dict[str, Any]:
    """Returns the block of a part with this text, or with these arguments of a call."""
    match part:
        case TextPart():
            return {"type": "text", "text": text}
        case ReasoningPart():
            return {"type": "thinking", "thinking": text, "signature": ""}
        case ToolCallPart():
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": _arguments(text)}


def _arguments(text: str) -> Any:
    """Returns the arguments of a call; an object without any if the answer was cut within them."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
