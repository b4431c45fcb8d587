"""Requests that wait until their grammar is compiled, before the scheduler knows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from radixkv.errors import QueueFull, RequestError
from radixkv.runtime.request import Request
from radixkv.runtime.step.plan import Row
from radixkv.runtime.step.result import TokenMasks
from radixkv.runtime.structured.grammars import Grammars
from radixkv.runtime.structured.masks import fill_masks
from radixkv.wire.messages import Submit

if TYPE_CHECKING:
    from radixkv.runtime.structured.matcher import Grammar


class GrammarGate:
    """A ``Gate`` for requests with structured outputs: their constraints are matchers of their grammars.

    Args:
        open_grammars: opens the compiler when it is needed first; raises ``UnsupportedFeature`` without one.
        max_requests: most requests of a sender that wait here. Only slow grammars make so many wait, and those that
            wait here take no room of others in the queue.
    """

    def __init__(self, open_grammars: Callable[[], Grammars], max_requests: int) -> None:
        self._open_grammars = open_grammars
        self._max_requests = max_requests
        self._grammars: Grammars | None = None
        self._choices: dict[int, list[Request]] = {}
        """By ticket: all choices of a request."""
        self._n_waiting: Counter[str] = Counter()
        """Requests by sender."""

    def __len__(self) -> int:
        return len(self._choices)

    def n_waiting(self, sender: str) -> int:
        """Returns how many requests of a sender wait."""
        return self._n_waiting[sender]

    @property
    def grammars(self) -> Grammars:
        """The compiler. Raises ``UnsupportedFeature``."""
        if self._grammars is None:
            self._grammars = self._open_grammars()
        return self._grammars

    def hold(self, message: Submit, choices: Sequence[Request]) -> bool:
        """Gives the choices of a request their matchers if the grammar is kept, or begins to compile it.

        Returns:
            Whether it must be compiled; ``take`` returns the request later.

        Raises:
            UnsupportedFeature: this engine has no grammars.
            InvalidRequest: the grammar was refused a short time ago.
            QueueFull: ``max_requests`` of its sender wait for theirs.
        """
        specification, sender = message.sampling.structured_outputs, choices[0].sender
        assert specification is not None, "only requests with structured outputs come here"
        if (grammar := self.grammars.get(specification, sender)) is not None:
            _give(choices, grammar)
            return False
        if (n_waiting := self._n_waiting[sender]) >= self._max_requests:
            raise QueueFull(f"the queue is full: {n_waiting} requests wait for their grammar; try later")
        self._choices[self.grammars.request(specification, sender)] = list(choices)
        self._n_waiting[sender] += 1
        return True

    def take(self) -> list[tuple[list[Request], RequestError | None]]:
        """Returns the requests whose grammar is compiled or refused; they no longer wait here. O(choices)."""
        taken: list[tuple[list[Request], RequestError | None]] = []
        for ticket, outcome in self.grammars.take_compiled():
            choices = self._forget(ticket)
            if isinstance(outcome, RequestError):
                taken.append((choices, outcome))
            else:
                _give(choices, outcome)
                taken.append((choices, None))
        return taken

    def leave(self, choices: Sequence[Request]) -> None:
        """Forgets a request, and with it its grammar unless that is kept. O(requests)."""
        ticket = next(ticket for ticket, waiting in self._choices.items() if waiting[0] is choices[0])
        self.grammars.cancel(ticket)
        self._forget(ticket)

    def descriptors(self) -> list[int]:
        """Returns descriptors, one of which is readable when a grammar is compiled."""
        return [] if self._grammars is None else [self._grammars.fileno()]

    def masks(self, rows: Sequence[tuple[Row, Request]], vocab_size: int) -> TokenMasks | None:
        """Does what ``fill_masks`` does, at its cost."""
        return fill_masks(rows, self.grammars, vocab_size)

    def close(self) -> None:
        """Closes the compiler, if it was opened."""
        if self._grammars is not None:
            self._grammars.close()

    def _forget(self, ticket: int) -> list[Request]:
        choices = self._choices.pop(ticket)
        self._n_waiting[choices[0].sender] -= 1
        return choices


def _give(choices: Sequence[Request], grammar: Grammar) -> None:
    for choice in choices:
        choice.constraint = grammar.new_matcher()
