"""The prompts of one HTTP request, which are sent together and read with one wake-up event."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

import msgspec

from radixkv.frontend.arrival import Arrival
from radixkv.frontend.in_flight import EndedRequest, InFlightRequest, RequestMetrics, TokenDelta, WakeUp
from radixkv.settings.tenants import OPERATOR
from radixkv.wire.messages import Submit


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

    async def send_requests(self, requests: Sequence[InFlightRequest]) -> None:
        """Sends all prompts or none; the requests then receive tokens. Raises ``RequestError``."""
        ...

    def cancel(self, request: InFlightRequest, choice: int | None = None) -> None:
        """Asks the runtime to end a request, or one choice of it. Does nothing if the request has ended."""
        ...

    def abandon(self, request: InFlightRequest) -> None:
        """Cancels a request and drops its later output."""
        ...


class RequestGroup:
    """The requests of one HTTP request, as a context manager.

    Entering it sends all of them or none, and leaving it cancels those that have not ended.

    Args:
        client: sends the requests.
        prompts: at least one.
        arrived: when and where the HTTP request arrived, and whose it is.
        streams: whether a client reads output as it arrives; one that falls too far behind fails.
    """

    def __init__(self, client: RequestSender, prompts: Sequence[Submit], arrived: Arrival, streams: bool) -> None:
        self._client = client
        self.wake = WakeUp()
        """Wakes the reader of ``deltas``, once for all that arrives together."""
        self._requests = [
            InFlightRequest(index, _addressed(prompt, arrived), self.wake, arrived, streams=streams)
            for index, prompt in enumerate(prompts)
        ]
        self._waiting = list(self._requests)
        """Those of which more output comes."""
        self._n_open = sum(prompt.sampling.n for prompt in prompts if not prompt.is_canary)
        """Choices whose finish reason is not counted yet."""

    async def __aenter__(self) -> Self:
        await self._client.send_requests(self._requests)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.metrics.ended("error" if isinstance(error, Exception) else "abort", self._n_open)
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

    async def deltas(self) -> AsyncGenerator[TokenDelta, None]:
        """Yields output, in order within each choice, until all requests have ended. Raises ``RequestError``."""
        while self._waiting:
            await self.wake.wait()
            for request in list(self._waiting):
                deltas = request.take_deltas()
                if request.is_over:
                    self._waiting.remove(request)
                for delta in deltas:
                    yield delta

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
    """Returns a prompt with the tenant and the session of its HTTP request."""
    if arrived.tenant != OPERATOR:
        prompt = msgspec.structs.replace(prompt, tenant=arrived.tenant)
    if arrived.session_id:
        prompt = msgspec.structs.replace(prompt, session_id=prompt.session_id or arrived.session_id)
    return prompt
