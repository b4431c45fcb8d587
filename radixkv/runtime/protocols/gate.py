"""The protocol of the branch ``structured``: requests wait until their constraints can be checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from radixkv.errors import RequestError
from radixkv.runtime.step.plan import Row
from radixkv.runtime.step.result import TokenMasks
from radixkv.wire.messages import Submit

if TYPE_CHECKING:
    from radixkv.runtime.request import Request


class Gate(Protocol):
    """Holds new requests back until their constraints can be checked.

    The loop asks ``hold`` and ``masks`` only for requests that need them, and ``take`` and ``descriptors`` only
    while it holds some.
    """

    def hold(self, message: Submit, choices: Sequence[Request]) -> bool:
        """Gives the choices of a request their constraints; returns whether they must wait for that.

        Raises ``RequestError`` if the request cannot have them, or if too many wait.
        """

    def __len__(self) -> int:
        """Returns how many requests wait."""

    def n_waiting(self, sender: str) -> int:
        """Returns how many requests of a sender wait."""

    def take(self) -> list[tuple[list[Request], RequestError | None]]:
        """Returns the requests that wait no longer: the choices of each, and the error if it cannot have its
        constraints."""

    def leave(self, choices: Sequence[Request]) -> None:
        """Forgets a request that has ended while it waited."""

    def descriptors(self) -> list[int]:
        """Returns descriptors, one of which is readable when ``take`` has something to return."""

    def masks(self, rows: Sequence[tuple[Row, Request]], vocab_size: int) -> TokenMasks | None:
        """Returns which tokens may be sampled at positions of a step's masked rows; None if no row needs a mask any
        more."""

    def close(self) -> None:
        """Frees what it has opened."""
