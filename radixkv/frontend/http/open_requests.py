"""The HTTP requests that have not ended, and what has to wait until those of now have."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count

from starlette.types import ASGIApp, Receive, Scope, Send


class OpenRequests:
    """Knows which HTTP requests may still use what new ones do not get any more."""

    def __init__(self) -> None:
        self._numbers = count()
        self._open: dict[int, None] = {}
        """Numbers of the requests that have not ended, ascending."""
        self._calls: deque[tuple[int, Callable[[], None]]] = deque()
        """What is called once no request below a number is open; numbers ascend."""

    def begin(self) -> int:
        """Notes that a request has come, and returns its number. O(1)."""
        number = next(self._numbers)
        self._open[number] = None
        return number

    def end(self, number: int) -> None:
        """Notes that a request has ended. O(open requests) at most."""
        del self._open[number]
        self._call()

    def after_open(self, call: Callable[[], None]) -> None:
        """Calls a function once all requests that are open now have ended; at once if there are none."""
        self._calls.append((next(self._numbers), call))
        self._call()

    def _call(self) -> None:
        oldest = next(iter(self._open), None)
        while self._calls and (oldest is None or self._calls[0][0] < oldest):
            self._calls.popleft()[1]()


class NotedRequests:
    """Notes the requests with a body, which may name a model, in ``OpenRequests``.

    Args:
        app: gets all requests.
        requests: gets a note of each.
    """

    def __init__(self, app: ASGIApp, requests: OpenRequests) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        number = self._requests.begin()
        try:
            await self._app(scope, receive, send)
        finally:
            self._requests.end(number)
