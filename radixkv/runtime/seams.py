"""The protocols through which the trunk of the runtime knows its branches.

The trunk is ``loop``, ``intake``, ``request``, ``scheduler``, ``cache`` and ``step``. A branch is a feature in a
folder of its own: ``tenants``, ``beams``, ``tiers``, ``structured``, ``lifetimes``, ``events``, ``reporting``. No
module of the trunk imports a branch, and no branch another; ``assemble`` and ``open_loop`` hand the branches in.
See docs/decisions/0060-trunk-and-branches.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from radixkv.errors import RequestError
from radixkv.runtime.step.plan import Row
from radixkv.runtime.step.result import TokenMasks
from radixkv.wire.messages import Submit

if TYPE_CHECKING:
    from radixkv.runtime.request import Request


class Observer(Protocol):
    """Follows the choices of a request that has chosen a branch, such as a session.

    A request that has chosen none calls no branch. The methods are called in the order in which they stand here.
    """

    def prompt_counted(self, request: Request) -> None:
        """Takes note that a choice's prompt is computed, and how much of it was cached."""
        ...

    def released(self, request: Request) -> None:
        """Takes note that a finished choice, whose prompt was computed, has released its pages."""
        ...

    def ended(self, choices: Sequence[Request], *, is_prompt_computed: bool) -> None:
        """Takes note that all choices have ended, unless the request has failed. Some may still hold pages."""
        ...


class RequestBranch(NamedTuple):
    """A branch that a request chooses by its message."""

    is_chosen: Callable[[Submit], bool]
    follow: Callable[[Submit, Sequence[Request]], Observer]
    """Begins to follow the choices of a request. Raises ``RequestError`` if the request cannot have the branch."""


class Constraint(Protocol):
    """What the tokens of one choice must obey, such as a grammar."""

    @property
    def has_ended(self) -> bool:
        """Whether the output is complete, so that no token may follow."""
        ...

    def accept(self, token: int) -> bool:
        """Appends a token to the output; False, without any change, if it is not allowed. O(1) mostly."""
        ...


class Gate(Protocol):
    """Holds new requests back until their constraints can be checked.

    The loop asks it only for requests that need it, and while it holds some.
    """

    def hold(self, message: Submit, choices: Sequence[Request]) -> bool:
        """Gives the choices of a request their constraints; returns whether they must wait for that.

        Raises ``RequestError`` if the request cannot have them, or if too many wait.
        """
        ...

    def take(self) -> list[tuple[list[Request], RequestError | None]]:
        """Returns the requests that wait no longer, by their choices, and why one cannot have its constraints."""
        ...

    def leave(self, choices: Sequence[Request]) -> None:
        """Forgets a request that has ended while it waited."""
        ...

    def descriptors(self) -> list[int]:
        """Returns descriptors of which one is readable when ``take`` has something to return."""
        ...

    def masks(self, rows: Sequence[tuple[Row, Request]], vocab_size: int) -> TokenMasks | None:
        """Returns which tokens the masked rows of a step may sample; None if no row needs to know any more."""
        ...

    def close(self) -> None:
        """Frees what it has opened."""
        ...
