"""The prompts of one HTTP request, which are sent together and read with one wake-up event."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, Self

import msgspec

from radixkv.errors import DeviceFailure, InvalidRequest, InvariantError, NumericalFailure, shortened
from radixkv.frontend.arrival import Arrival
from radixkv.frontend.in_flight import EndedRequest, InFlightRequest, RequestMetrics, TokenDelta, WakeUp
from radixkv.wire.cache_messages import Stored
from radixkv.wire.messages import Submit

_OF_ONE_PROMPT = (InvalidRequest, NumericalFailure, DeviceFailure)
"""Errors of the runtime that are about the prompt that got them; others end many at once."""


class RequestSender(Protocol):
    """Sends requests to a runtime, and gives them the output."""

    @property
    def metrics(self) -> RequestMetrics:
        """Records latencies and finish reasons."""
        ...

    @property
    def on_end(self) -> Sequence[Callable[[EndedRequest], None]]:
        """Called at the end of each request that a client sent."""
        ...

    async def send_requests(self, requests: Sequence[InFlightRequest], *, are_first: bool) -> None:
        """Sends all prompts or none; the requests then receive tokens. Raises ``RequestError``.

        Args:
            requests: of one group.
            are_first: whether none of the group was sent before. A server that shuts down refuses only these.
        """
        ...

    def expect(self, n_more: int) -> None:
        """Counts prompts of a group that has begun, which will be sent; negative for those that no longer will."""
        ...

    def cancel(self, request: InFlightRequest, choice: int | None = None) -> None:
        """Asks the runtime to end a request, or one choice of it. Does nothing if the request has ended."""
        ...

    def abandon(self, request: InFlightRequest) -> None:
        """Cancels a request and drops its later output."""
        ...

    async def stored(self, request: InFlightRequest) -> Stored:
        """Asks the runtime that has computed a prompt how much of it the tiers below the device have.

        Raises ``RequestError``.

        Args:
            request: it was sent, and its group is open.
        """
        ...

    def begin_pause(self, request: InFlightRequest, tools: Sequence[str]) -> None:
        """Tells the runtime that has computed an answer that a prompt can go on from it.

        Args:
            request: it has ended.
            tools: names of the tools that the answer has called.
        """
        ...


class RequestGroup:
    """The requests of one HTTP request, as a context manager.

    Entering it sends all of them or none, or the first ``max_in_flight``. Leaving it cancels those that have not
    ended.

    Args:
        client: sends the requests.
        prompts: at least one.
        arrived: when and where the HTTP request arrived, and whose it is.
        streams: whether a client reads output as it arrives; one that falls too far behind fails.
        max_in_flight: most that the runtime has at a time; others are sent as these end. None: all.
    """

    def __init__(
        self,
        client: RequestSender,
        prompts: Sequence[Submit],
        arrived: Arrival,
        streams: bool,
        max_in_flight: int | None = None,
    ) -> None:
        self._client = client
        self.wake = WakeUp()
        """Wakes the reader of ``deltas``, once for all that arrives together."""
        self._prompts = prompts
        self._arrived = arrived
        self._streams = streams
        self._max_in_flight = max_in_flight or len(prompts)
        self._requests: list[InFlightRequest] = []
        """Those that were sent, in the order of the prompts."""
        self._waiting: list[InFlightRequest] = []
        """Those of which more output comes."""
        self._pauses: list[tuple[InFlightRequest, Sequence[str]]] = []
        """Whose answers a prompt can go on from, with the names of the tools that they have called."""
        self._n_open = sum(prompt.sampling.n for prompt in prompts if not prompt.is_canary)
        """Choices whose finish reason is not counted yet."""

    async def __aenter__(self) -> Self:
        await self._send_next(self._max_in_flight)
        self._client.expect(len(self._prompts) - len(self._requests))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.expect(len(self._requests) - len(self._prompts))
        self._client.metrics.ended("error" if isinstance(error, Exception) else "abort", self._n_open)
        for request, tools in self._pauses:
            self._client.begin_pause(request, tools)
        for request in self._requests:
            self._client.abandon(request)
            if self._client.on_end and request.is_reported:
                ended = request.report(error)
                for report in self._client.on_end:
                    report(ended)

    def end_choice(self, delta: TokenDelta, reason: str) -> None:
        """Counts a choice's end, and cancels the choice if the runtime does not know of the end.

        The runtime's own final message of the choice still comes.
        """
        self._n_open -= 1
        self._client.metrics.ended(reason)
        self._requests[delta.prompt].finish_reasons.append(reason)
        if delta.finish_reason is None:
            self._client.cancel(self._requests[delta.prompt], delta.choice)

    def begin_pause(self, delta: TokenDelta, tools: Sequence[str]) -> None:
        """Notes that a prompt can go on from an answer, which has called these tools.

        The runtime is told at the end of the group: it knows of the answer's end then.
        """
        self._pauses.append((self._requests[delta.prompt], tools))

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Counts as in flight even once all requests of the group have ended: a server that ends waits."""
        self._client.expect(1)
        try:
            yield
        finally:
            self._client.expect(-1)

    async def stored(self, index: int) -> Stored:
        """Asks how much of a prompt has reached the tiers below the device. Raises ``RequestError``."""
        return await self._client.stored(self._requests[index])

    async def _send_next(self, n_prompts: int) -> None:
        """Sends the next prompts, all or none."""
        begin = len(self._requests)
        requests = [
            InFlightRequest(
                index, _addressed(prompt, self._arrived), self.wake, self._arrived, streams=self._streams
            )
            for index, prompt in enumerate(self._prompts[begin : begin + n_prompts], begin)
        ]
        await self._client.send_requests(requests, are_first=not begin)
        self._requests += requests
        self._waiting += requests

    async def deltas(self) -> AsyncGenerator[TokenDelta, None]:
        """Yields output, in order within each choice, until all requests have ended.

        Raises:
            RequestError: one has failed; it has the prompt's number if it is about one of several.
        """
        while self._waiting:
            await self.wake.wait()
            for request in list(self._waiting):
                try:
                    deltas = request.take_deltas()
                except _OF_ONE_PROMPT as error:
                    if len(self._prompts) > 1:
                        error.index = request.index
                    raise
                if request.is_over:
                    self._waiting.remove(request)
                for delta in deltas:
                    yield delta
            n_free = self._max_in_flight - len(self._waiting)
            if n_free and len(self._requests) < len(self._prompts):
                n_sent = len(self._requests)
                await self._send_next(n_free)
                self._client.expect(n_sent - len(self._requests))

    def take_quick(self) -> list[TokenDelta] | None:
        """Returns what ``deltas`` would yield next, while that waits.

        None, and nothing is taken, if a request is over or if its output should be rendered in a thread.
        """
        deltas: list[TokenDelta] = []
        for request in self._waiting:
            if not request.is_quick:
                return None
        for request in self._waiting:
            deltas += request.take_deltas()
        return deltas


def _addressed(prompt: Submit, arrived: Arrival) -> Submit:
    """Returns a prompt with the session of its HTTP request.

    Raises ``InvariantError`` if it has another tenant: it would share KV with those who must not notice it.
    """
    if prompt.namespace.tenant != arrived.tenant:
        raise InvariantError(
            f"a prompt for {arrived.route or 'a check of the server itself'} has the tenant "
            f"{shortened(prompt.namespace.tenant)}, but {shortened(arrived.tenant)} sent the request"
        )
    if arrived.session_id:
        prompt = msgspec.structs.replace(prompt, session_id=prompt.session_id or arrived.session_id)
    return prompt
