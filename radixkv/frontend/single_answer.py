"""One prompt's only answer while it is generated, and its usage so far."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from radixkv.frontend.chat import Chat, ChatPrompt, chat_prompt
from radixkv.frontend.client import RuntimeClient
from radixkv.frontend.field_names import naming_answer_format
from radixkv.frontend.http.disconnect import cancel_on_disconnect
from radixkv.frontend.http.sse import EventStream
from radixkv.frontend.in_flight import Arrival, TokenDelta, is_slow_to_render
from radixkv.frontend.served_model import ServedModel
from radixkv.generation.output import ChoiceStream, OutputDelta
from radixkv.wire.messages import ComputedPrompt


class SingleAnswer:
    """Runs a prompt with one answer. Iterate ``outputs`` once.

    Args:
        chat: the conversation, for the names of its fields in errors.
        prompt: its prompt.
        served_model: ends the answer and turns it into text.
        arrived: when and where the request arrived.
    """

    def __init__(self, chat: Chat, prompt: ChatPrompt, served_model: ServedModel, *, arrived: Arrival) -> None:
        self.id = prompt.submit.id
        """Identifies the request, also in the log; of hexadecimal digits."""
        self.n_prompt = len(prompt.submit.tokens) // 4
        self.ends_with_context = prompt.ends_with_context
        """Whether an answer that ends by its length has filled the context."""
        self._computed: ComputedPrompt | None = None
        """What the cache gave and got of the prompt; None before the first token."""
        self._prompt = prompt.submit
        self._keeper = prompt.keeper
        self._chat = chat
        self._served_model = served_model
        self._arrived = arrived
        self._choice: ChoiceStream[None] = ChoiceStream(
            prompt.submit.sampling,
            served_model,
            parser=prompt.open_parser(served_model),
            prompt=prompt.submit.tokens,
        )

    @property
    def n_output(self) -> int:
        """Tokens of the answer so far."""
        return self._choice.n_tokens

    @property
    def n_reasoning(self) -> int:
        """Tokens of the answer's reasoning so far."""
        return self._choice.n_reasoning_tokens

    @property
    def n_cached(self) -> int:
        """Prompt tokens that were not computed; 0 before the first token."""
        return 0 if self._computed is None else self._computed.cache_use.n_cached

    @property
    def n_written(self) -> int:
        """Prompt tokens that were computed and are cached now, in whole pages; 0 before the first token."""
        if self._computed is None:
            return 0
        page_size = self._served_model.ready.page_size
        return min(self._computed.cache_use.n_added, max(0, self.n_prompt // page_size * page_size - self.n_cached))

    async def outputs(self, client: RuntimeClient, *, streams: bool) -> AsyncGenerator[OutputDelta[None], None]:
        """Yields the output as it arrives. Raises ``RequestError``; closing it cancels the request.

        Args:
            client: sends the request.
            streams: whether a client reads the output as it arrives; one that falls too far behind fails.
        """
        group = client.submit([self._prompt], arrived=self._arrived, streams=streams)
        with naming_answer_format(self._format_field):
            async with group, aclosing(group.deltas()) as deltas:
                async for delta in deltas:
                    if delta.computed is not None:
                        self._computed = delta.computed
                    if is_slow_to_render(delta):
                        output = await asyncio.to_thread(self._convert, delta)
                    else:
                        output = self._convert(delta)
                    if output.finish_reason is not None:
                        group.end_choice(delta, output.finish_reason)
                    if not output.is_empty:
                        yield output

    async def whole(self, client: RuntimeClient) -> OutputDelta[None]:
        """Returns the whole output. Raises ``RequestError``; cancelling it cancels the request."""
        whole: OutputDelta[None] = OutputDelta()
        async with aclosing(self.outputs(client, streams=False)) as outputs:
            async for output in outputs:
                whole.add(output)
        return whole

    def _format_field(self) -> str:
        """Returns the field of the request that says what its answer must match."""
        has_format = self._chat.sampling.get("structured_outputs") is not None
        return self._chat.field_name("structured_outputs") if has_format else "tools"

    def _convert(self, delta: TokenDelta) -> OutputDelta[None]:
        if self._keeper is not None:
            self._keeper.add(delta)
        return self._choice.absorb(delta.tokens, delta.logprobs, delta.finish_reason, delta.stop_token_id)


class AnswerWriter(Protocol):
    """Writes one answer in the form of an API."""

    async def whole(self, client: RuntimeClient) -> bytes:
        """Returns the JSON of the response. Raises ``RequestError``; cancelling it cancels the request."""
        ...

    def events(self, client: RuntimeClient) -> AsyncGenerator[bytes, None]:
        """Yields the stream's events, up to the last; closing it cancels the request."""
        ...


async def respond(
    request: Request,
    chat: Chat,
    open_writer: Callable[[SingleAnswer], AnswerWriter],
    client: RuntimeClient,
    served_model: ServedModel,
    *,
    streams: bool,
    arrived: Arrival,
) -> Response:
    """Answers a conversation once, as a stream or whole. Raises ``RequestError``; a disconnect cancels the request.

    Args:
        request: of the client who may leave.
        chat: the conversation.
        open_writer: returns what writes the answer.
        client: runs the prompt.
        served_model: answers.
        streams: whether the client wants a stream.
        arrived: when and where the request arrived, and whose it is.
    """
    prompt = await cancel_on_disconnect(request.receive, chat_prompt(chat, served_model, arrived.tenant))
    writer = open_writer(SingleAnswer(chat, prompt, served_model, arrived=arrived))
    if streams:
        return EventStream(writer.events(client), end=b"")
    whole = await cancel_on_disconnect(request.receive, writer.whole(client))
    return Response(whole, media_type="application/json")
