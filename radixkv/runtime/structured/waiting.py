"""Requests that wait until their grammar is compiled, before the scheduler knows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from radixkv.errors import QueueFull, RequestError
from radixkv.runtime.request import Phase, Request
from radixkv.runtime.structured.grammars import Grammars
from radixkv.wire.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from radixkv.runtime.structured.matcher import Grammar


class CompiledRequest(NamedTuple):
    """A request whose grammar is compiled or refused."""

    choices: list[Request]
    """All of them, in phase ``WAITING``."""
    cancelled: list[Request]
    """Those of the choices that were cancelled meanwhile."""
    error: RequestError | None
    """Why there is no grammar; None if each choice has its matcher."""


class CompilingRequests:
    """The choices of requests whose grammar is being compiled, in phase ``COMPILING``.

    Args:
        open_grammars: opens the compiler when it is needed first; raises ``UnsupportedFeature`` without one.
        max_requests: most requests of a tenant that wait here. Only slow grammars make so many wait, and those that
            wait here take no room of others in the queue.
    """

    def __init__(self, open_grammars: Callable[[], Grammars], max_requests: int) -> None:
        self._open_grammars = open_grammars
        self._max_requests = max_requests
        self._grammars: Grammars | None = None
        self._choices: dict[int, list[Request]] = {}
        """By ticket: all choices of a request."""
        self._n_waiting: Counter[str] = Counter()
        """Requests by tenant."""
        self._cancelled: set[Request] = set()

    def __len__(self) -> int:
        return len(self._choices)

    def n_waiting(self, tenant: str) -> int:
        """Requests of a tenant."""
        return self._n_waiting[tenant]

    @property
    def grammars(self) -> Grammars:
        """The compiler. Raises ``UnsupportedFeature``."""
        if self._grammars is None:
            self._grammars = self._open_grammars()
        return self._grammars

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of which one is readable when a grammar is compiled."""
        return [] if self._grammars is None else [self._grammars.fileno()]

    def add(self, choices: Sequence[Request], specification: StructuredOutputs) -> bool:
        """Gives the choices of a request their matchers if the grammar is kept, or begins to compile it.

        Returns:
            Whether they have their matchers; if not, ``take`` returns them later.

        Raises:
            UnsupportedFeature: this engine has no grammars.
            InvalidRequest: the grammar was refused a short time ago.
            QueueFull: ``max_requests`` of its tenant wait for theirs.
        """
        tenant = choices[0].tenant
        if (grammar := self.grammars.get(specification, tenant)) is not None:
            _give(choices, grammar)
            return True
        if (n_waiting := self._n_waiting[tenant]) >= self._max_requests:
            raise QueueFull(f"the queue is full: {n_waiting} requests wait for their grammar; try later")
        self._choices[self.grammars.request(specification, tenant)] = list(choices)
        self._n_waiting[tenant] += 1
        for choice in choices:
            choice.phase = Phase.COMPILING
        return False

    def cancel(self, choice: Request) -> bool:
        """Cancels one choice; the others go on. False if it was cancelled before. O(1)."""
        is_new = choice not in self._cancelled
        self._cancelled.add(choice)
        return is_new

    def leave(self, choices: Sequence[Request]) -> None:
        """Drops a request, given by all its choices. O(requests)."""
        self._drop(next(ticket for ticket, waiting in self._choices.items() if waiting[0] is choices[0]))

    def take_received_before(self, time_s: float) -> list[Request]:
        """Drops the requests that were received before that time, and returns their first choices, oldest first.

        O(1), and O(choices) a request.
        """
        taken = []
        while self._choices:
            ticket, (first, *_) = next(iter(self._choices.items()))
            if first.received_at >= time_s:
                break
            self._drop(ticket)
            taken.append(first)
        return taken

    def take(self) -> list[CompiledRequest]:
        """Returns the requests whose grammar is compiled or refused; they no longer wait here. O(choices)."""
        if self._grammars is None:
            return []
        requests = []
        for ticket, outcome in self._grammars.take_compiled():
            choices = self._choices[ticket]
            cancelled = [choice for choice in choices if choice in self._cancelled]
            self._forget(ticket)
            for choice in choices:
                choice.phase = Phase.WAITING
            if isinstance(outcome, RequestError):
                requests.append(CompiledRequest(choices, cancelled, outcome))
            else:
                _give(choices, outcome)
                requests.append(CompiledRequest(choices, cancelled, None))
        return requests

    def close(self) -> None:
        """Closes the compiler, if it was opened."""
        if self._grammars is not None:
            self._grammars.close()

    def _drop(self, ticket: int) -> None:
        self.grammars.cancel(ticket)
        for choice in self._choices[ticket]:
            choice.phase = Phase.FINISHED
        self._forget(ticket)

    def _forget(self, ticket: int) -> None:
        choices = self._choices.pop(ticket)
        self._n_waiting[choices[0].tenant] -= 1
        self._cancelled.difference_update(choices)


def _give(choices: Sequence[Request], grammar: Grammar) -> None:
    for choice in choices:
        choice.matcher = grammar.new_matcher()
