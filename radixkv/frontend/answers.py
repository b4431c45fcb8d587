"""The one pump of answers: submits prompts, and turns what the runtime sends into the outputs of their choices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, nullcontext
from typing import Any, Generic, Protocol

from starlette.requests import Request
from starlette.responses import Response

from radixkv.frontend.arrival import Arrival
from radixkv.frontend.chat import Chat, ChatPrompt, chat_prompt
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.field_names import naming_answer_format
from radixkv.frontend.http.disconnect import cancel_on_disconnect
from radixkv.frontend.http.sse import DONE_EVENT, EventStream
from radixkv.frontend.in_flight import TokenDelta, is_slow_to_render, without_output
from radixkv.frontend.miss_report import miss_fields
from radixkv.frontend.request_group import RequestGroup
from radixkv.frontend.served_model import ServedModel
from radixkv.frontend.stored_prompts import stored_fields, until_stored
from radixkv.generation.logprobs import RenderedT, TokenRenderer
from radixkv.generation.models import GenerationModel
from radixkv.generation.output import ChoiceStream, OutputDelta
from radixkv.wire.cache_messages import Stored
from radixkv.wire.messages import ComputedPrompt, Submit, TokenLogprobs


class PromptAnswers(Generic[RenderedT]):
    """One prompt of a request with its choices, as far as they have come.

    Args:
        prompt: as it is submitted.
        model: ends answers and turns them into text.
        render_token: renders a token's logprobs; None if the response shows none.
        chat: splits the text of answers into parts, and keeps them for later turns; None for a prompt of no chat.
        first_offset: characters before the answer in a choice's text, if ``render_token`` needs the offset of each
            token; None: it gets 0 as the offset.
        repeats_partial: whether a choice's text begins with the character that is incomplete at the end of the
            prompt's.
        generates: False leaves out the token that had to be generated, because only the prompt is wanted.
        is_for_cache: whether it is wanted for the cache: the response comes once all tiers have it.
    """

    def __init__(
        self,
        prompt: Submit,
        model: GenerationModel,
        render_token: TokenRenderer[RenderedT] | None = None,
        *,
        chat: ChatPrompt | None = None,
        first_offset: int | None = None,
        repeats_partial: bool = False,
        generates: bool = True,
        is_for_cache: bool = False,
    ) -> None:
        self.prompt = prompt
        self.waits_for_tiers = is_for_cache and prompt.reads_cache and model.ready.n_host_slots is not None
        """Whether the response comes once all tiers have the prompt."""
        self.stored: Stored | None = None
        """What they have of it, once they were waited for."""
        self.n_prompt = len(prompt.tokens) // 4
        """Tokens of the prompt."""
        self.computed: ComputedPrompt | None = None
        """What the cache gave and got of the prompt; None before the first token."""
        self.choices = [
            ChoiceStream(
                prompt.sampling,
                model,
                render_token,
                first_offset,
                None if chat is None else chat.open_parser(model),
                prompt=prompt.tokens,
                repeats_partial=repeats_partial,
            )
            for _ in range(prompt.sampling.n)
        ]
        self._keeper = None if chat is None else chat.keeper
        self._tools: list[str] = []
        """Names of the tools that the answer has called, if a pause may follow it."""
        self._generates = generates

    def absorb(self, delta: TokenDelta) -> OutputDelta[RenderedT]:
        """Returns the output of what is new of one choice."""
        if delta.computed is not None:
            self.computed = delta.computed
        if delta.prompt_logprobs:
            self.absorb_prompt_logprobs(delta.prompt_logprobs)
        if self._keeper is not None:
            self._keeper.add(delta)
        if not self._generates:
            delta = without_output(delta)
        choice = self.choices[delta.choice]
        output = choice.absorb(delta.tokens, delta.logprobs, delta.finish_reason, delta.stop_token_id)
        if self.prompt.may_pause:
            self._tools += [call.name for call in output.tool_calls if call.name]
        return output

    def note_end(self, group: RequestGroup, delta: TokenDelta, output: OutputDelta[RenderedT]) -> None:
        """Ends a choice with its last output, and notes whether a later prompt can go on from it."""
        if output.finish_reason is None:
            return
        group.end_choice(delta, output.finish_reason)
        is_cut = isinstance(output.stop_reason, str)
        if self.prompt.may_pause and self._keeper is not None and self._keeper.has_kept and not is_cut:
            group.begin_pause(delta, self._tools)

    def absorb_prompt_logprobs(self, token_logprobs: Sequence[TokenLogprobs]) -> None:
        """Takes the logprobs of the prompt's next tokens, from its second on. This class drops them."""


class PartSink(Protocol):
    """Where the parts of a response are written."""

    @property
    def is_full(self) -> bool:
        """Whether so much is unsent that nothing should be written for now."""
        ...

    def write_part(self, part: bytes) -> None:
        """Writes the next part."""
        ...


class Answers(Generic[RenderedT]):
    """The prompts of one request with what runs them. Iterate ``deltas_and_outputs`` once.

    Args:
        prompts: the prompts.
        client: sends them to the runtime, all or none.
        arrived: when and where the request arrived, and whose it is.
        format_field: the field by which the client said what the answers must match, which errors of the grammar
            name.
    """

    def __init__(
        self,
        prompts: Sequence[PromptAnswers[RenderedT]],
        client: EngineClient,
        arrived: Arrival,
        format_field: str = "tools",
    ) -> None:
        self._prompts = prompts
        self._client = client
        self._arrived = arrived
        self._format_field = format_field
        self._group: RequestGroup | None = None
        """The running requests; None before the first delta is asked for."""

    async def deltas_and_outputs(
        self, *, streams: bool
    ) -> AsyncGenerator[tuple[TokenDelta, OutputDelta[RenderedT]], None]:
        """Yields each delta with its output. The last delta of a prompt is yielded even if its output is empty.

        Ends once prompts that were wanted for the cache are in all tiers.

        Raises ``RequestError``; closing it cancels the request.

        Args:
            streams: whether a client reads the output as it arrives; one that falls too far behind fails.
        """
        submits = [each.prompt for each in self._prompts]
        group = self._group = self._client.submit(submits, arrived=self._arrived, streams=streams)
        for_tiers = [index for index, each in enumerate(self._prompts) if each.waits_for_tiers]
        with naming_answer_format(self._format_field):
            async with group, aclosing(group.deltas()) as deltas:
                with group.in_flight() if for_tiers else nullcontext():
                    async for delta in deltas:
                        absorb = self._prompts[delta.prompt].absorb
                        output = (
                            await asyncio.to_thread(absorb, delta) if is_slow_to_render(delta) else absorb(delta)
                        )
                        self._prompts[delta.prompt].note_end(group, delta, output)
                        yield delta, output
                    started_at = time.monotonic()
                    for index in for_tiers:
                        self._prompts[index].stored = await until_stored(group, index, started_at)

    def write_directly(self, sink: PartSink, render: Callable[[TokenDelta, OutputDelta[RenderedT]], bytes]) -> None:
        """From now on writes output as it arrives, where that is quick, and ``deltas_and_outputs`` yields the rest.

        Args:
            sink: where it is written; while it is full, all output is yielded.
            render: returns the part of the response that output makes; it may be empty.
        """
        assert self._group is not None, "the first delta comes first"
        self._group.wake.reader = _DirectAnswers(self._group, self._prompts, sink, render)


class _DirectAnswers(Generic[RenderedT]):
    """The reader of a running request's output that writes it to a sink. See ``Answers.write_directly``."""

    def __init__(
        self,
        group: RequestGroup,
        prompts: Sequence[PromptAnswers[RenderedT]],
        sink: PartSink,
        render: Callable[[TokenDelta, OutputDelta[RenderedT]], bytes],
    ) -> None:
        self._group = group
        self._prompts = prompts
        self._sink = sink
        self._render = render
        self._part = b""

    def take(self) -> bool:
        """See ``DirectReader.take``."""
        if self._sink.is_full or (deltas := self._group.take_quick()) is None:
            return False
        parts = []
        for delta in deltas:
            prompt = self._prompts[delta.prompt]
            output = prompt.absorb(delta)
            prompt.note_end(self._group, delta, output)
            parts.append(self._render(delta, output))
        self._part = b"".join(parts)
        return True

    def write(self) -> None:
        """See ``DirectReader.write``."""
        if self._part:
            self._sink.write_part(self._part)


class SingleAnswer(PromptAnswers[None]):
    """A chat's only answer, and its usage so far. Iterate ``nonempty_outputs`` once.

    Args:
        chat: the conversation.
        prompt: its prompt.
        client: runs it.
        served_model: ends the answer and turns it into text.
        arrived: when and where the request arrived.
    """

    def __init__(
        self, chat: Chat, prompt: ChatPrompt, client: EngineClient, served_model: ServedModel, arrived: Arrival
    ) -> None:
        super().__init__(
            prompt.submit, served_model, chat=prompt, generates=prompt.generates, is_for_cache=not prompt.generates
        )
        self._ready = served_model.ready
        self.id = prompt.submit.id
        """Identifies the request, also in the log; of hexadecimal digits."""
        self.ends_with_context = prompt.ends_with_context
        """Whether an answer that ends by its length has filled the context."""
        self.cache_miss: dict[str, Any] | None = None
        """Why the prompt was not cached further, known at the end; None if it lacked less than a page."""
        self.eviction_fields: dict[str, dict[str, int]] = {}
        """What the usage says of KV that the answer went on without, known at the end; none of an exact one."""
        self._tokenizer = served_model.tokenizer
        self._answers = Answers([self], client, arrived, chat.format_field)
        self._page_size = served_model.ready.page_size

    def absorb(self, delta: TokenDelta) -> OutputDelta[None]:
        """See ``PromptAnswers.absorb``."""
        if delta.done is not None and delta.done.miss is not None:
            self.cache_miss = miss_fields(delta.done.miss, self._tokenizer)
        if delta.done is not None and delta.done.kv_eviction is not None:
            self.eviction_fields = {"kv_eviction": delta.done.kv_eviction.fields}
        return super().absorb(delta)

    @property
    def n_output(self) -> int:
        """Tokens of the answer so far."""
        return self.choices[0].n_tokens

    @property
    def n_reasoning(self) -> int:
        """Tokens of the answer's reasoning so far."""
        return self.choices[0].n_reasoning_tokens

    @property
    def n_cached(self) -> int:
        """Prompt tokens that were not computed; 0 before the first token."""
        return 0 if self.computed is None else self.computed.cache_use.n_cached

    @property
    def n_written(self) -> int:
        """Prompt tokens that were computed and are cached now, in whole pages; 0 before the first token."""
        if self.computed is None:
            return 0
        n_whole = self.n_prompt // self._page_size * self._page_size
        return min(self.computed.cache_use.n_added, max(0, n_whole - self.n_cached))

    @property
    def stored_fields(self) -> dict[str, dict[str, int]]:
        """What the usage says of the tiers that have the prompt; nothing if it is not only for the cache."""
        return stored_fields([self.stored], self._ready)

    async def nonempty_outputs(self, *, streams: bool) -> AsyncGenerator[OutputDelta[None], None]:
        """Yields the output as it arrives. Raises ``RequestError``; closing it cancels the request.

        Args:
            streams: whether a client reads the output as it arrives; one that falls too far behind fails.
        """
        async with aclosing(self._answers.deltas_and_outputs(streams=streams)) as outputs:
            async for _, output in outputs:
                if not output.is_empty:
                    yield output

    def write_directly(self, sink: PartSink, render: Callable[[OutputDelta[None]], bytes]) -> None:
        """From now on writes output as it arrives, where that is quick, and ``nonempty_outputs`` yields the rest.

        Args:
            sink: where it is written; while it is full, all output is yielded.
            render: returns the part of the response that output makes; it may be empty.
        """
        self._answers.write_directly(sink, lambda _, output: b"" if output.is_empty else render(output))

    async def whole(self) -> OutputDelta[None]:
        """Returns the whole output. Raises ``RequestError``; cancelling it cancels the request."""
        whole: OutputDelta[None] = OutputDelta()
        async with aclosing(self.nonempty_outputs(streams=False)) as outputs:
            async for output in outputs:
                whole.add(output)
        return whole


async def open_answer(
    request: Request, chat: Chat, client: EngineClient, served_model: ServedModel, arrived: Arrival
) -> SingleAnswer:
    """Returns the answer to a chat, before anything is submitted. Raises ``InvalidRequest``."""
    encoding = chat_prompt(chat, served_model, arrived.tenant)
    return SingleAnswer(chat, await cancel_on_disconnect(request.receive, encoding), client, served_model, arrived)


class AnswerWriter(Protocol):
    """Writes the answers to one request in the form of an API. Use either method, once."""

    async def whole(self) -> bytes:
        """Returns the JSON of the response. Raises ``RequestError``; cancelling it cancels the request."""
        ...

    def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the stream's events; closing it cancels the request.

        Raises:
            RequestError: the request failed.
        """
        ...

    def write_directly(self, sink: PartSink) -> None:
        """From now on writes events to ``sink`` as they become known, where that is quick; others are yielded.

        The first event was yielded before.
        """
        ...


async def respond(request: Request, writer: AnswerWriter, *, streams: bool, end: bytes = DONE_EVENT) -> Response:
    """Answers as a stream or whole. Raises ``RequestError``; a disconnect cancels the request.

    Args:
        request: of the client who may leave.
        writer: runs the prompts.
        streams: whether the client wants a stream.
        end: what follows the last event of a stream.
    """
    if streams:
        return EventStream(writer.events(), end, writer.write_directly)
    whole = await cancel_on_disconnect(request.receive, writer.whole())
    return Response(whole, media_type="application/json")
