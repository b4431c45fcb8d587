"""Responses of ``/v1/responses``, whole or as a stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import chain, count
from typing import Any

import msgspec

from radixkv.errors import RequestError
from radixkv.frontend.answers import PartSink, SingleAnswer
from radixkv.frontend.api.responses.diagnostics import applied_options, diagnostics_field, response_id
from radixkv.frontend.api.responses.items import Event, OutputItems
from radixkv.frontend.api.responses.schema import ResponsesRequest
from radixkv.frontend.api.responses.translation import SEALED_REASONING
from radixkv.frontend.cache_diagnostics.diagnosis import Diagnosis
from radixkv.frontend.http.sse import typed_event
from radixkv.generation.output import OutputDelta


class ResponsesWriter:
    """Runs one request and writes its response. Use either ``whole`` or ``events``, once.

    Args:
        request: the parsed body.
        answer: runs the prompt.
        model: the name of the model.
        diagnosis: what to tell of an earlier response; None for nothing.
    """

    def __init__(
        self, request: ResponsesRequest, answer: SingleAnswer, model: str, diagnosis: Diagnosis | None = None
    ) -> None:
        self._answer = answer
        self._diagnosis = diagnosis
        self._explains_cache = bool(request.explain_cache) or (diagnosis is not None and diagnosis.is_asked)
        self._length_status = "completed" if request.prewarms else "incomplete"
        """The status of a response that ends by its length; a prompt alone is whole."""
        self._items = OutputItems(seals_reasoning=SEALED_REASONING in (request.include or ()))
        self._numbers = count()
        self._has_begun = False
        """Whether the stream has its first event."""
        self._end = "completed"
        """The status of the response at its end."""
        text_format = None if request.text is None else request.text.format
        self._head = {
            "id": response_id(answer),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_diagnostics": None,
            "prompt_cache_key": request.prompt_cache_key,
            "prompt_cache_options": applied_options(request.prompt_cache_options),
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "store": False,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"} if text_format is None else msgspec.to_builtins(text_format)},
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": request.tools or [],
            "top_p": request.top_p,
            "truncation": request.truncation or "disabled",
        }

    async def whole(self) -> bytes:
        """Returns the JSON of the response. Raises ``RequestError``; cancelling it cancels the request."""
        output = await self._answer.whole()
        self._diagnose()
        status = self._status(output.finish_reason)
        for _ in chain(*map(self._items.add, output.parts), self._items.end(status)):
            pass  # only the items matter here
        return msgspec.json.encode(self._response(status))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the stream's events; closing it cancels the request.

        Raises:
            RequestError: the request failed before the first event. A later failure is an event.
        """
        try:
            async with aclosing(self._answer.nonempty_outputs(streams=True)) as outputs:
                async for output in outputs:
                    if part := self._part(output):
                        yield part
        except RequestError as error:
            if not self._has_begun:
                raise
            failed = self._response("failed") | {"error": {"code": "server_error", "message": str(error)}}
            yield self._encode([{"type": "response.failed", "response": failed}])
            return
        events = list(self._items.end(self._end))
        yield self._encode([*events, {"type": f"response.{self._end}", "response": self._response(self._end)}])

    def write_directly(self, sink: PartSink) -> None:
        """See ``AnswerWriter.write_directly``."""
        self._answer.write_directly(sink, self._part)

    def _part(self, output: OutputDelta[None]) -> bytes:
        """Returns the events of new output; nothing for none."""
        events = [] if self._has_begun else self._begin()
        self._has_begun = True
        for part in output.parts:
            events += self._items.add(part)
        if output.finish_reason is not None:
            self._end = self._status(output.finish_reason)
        return self._encode(events)

    def _begin(self) -> list[Event]:
        self._diagnose()
        response = self._response("in_progress")
        return [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]

    def _encode(self, events: list[Event]) -> bytes:
        return b"".join([typed_event({**event, "sequence_number": next(self._numbers)}) for event in events])

    def _response(self, status: str) -> dict[str, Any]:
        """Returns the response object as it is now."""
        return self._head | {
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._items.items),
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _diagnose(self) -> None:
        """Compares the request with an earlier one, if it asks for that: once, when its prompt is computed."""
        if self._diagnosis is not None:
            verdict = self._diagnosis.conclude(self._answer.n_cached)
            self._head["prompt_cache_diagnostics"] = diagnostics_field(verdict)

    def _status(self, finish_reason: str | None) -> str:
        return self._length_status if finish_reason == "length" else "completed"

    def _usage(self) -> dict[str, Any]:
        answer = self._answer
        has_miss = self._explains_cache and answer.cache_miss is not None
        explained = {"cache_miss": answer.cache_miss} if has_miss else {}
        return {
            "input_tokens": answer.n_prompt,
            "input_tokens_details": {
                "cached_tokens": answer.n_cached,
                "cache_write_tokens": answer.n_written,
                **answer.stored_fields,
                **explained,
            },
            "output_tokens": answer.n_output,
            "output_tokens_details": {"reasoning_tokens": answer.n_reasoning},
            "total_tokens": answer.n_prompt + answer.n_output,
            **answer.eviction_fields,
        }
