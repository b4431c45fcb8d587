"""The protocol of the branch ``headroom``: pages are foreseen for running answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixkv.runtime.request import Request


class Headroom:
    """Foresees which pages running answers will need, so that new requests are not admitted into them.

    This class is the protocol and its default, which foresees nothing. O(1) each.
    """

    def step(self) -> None:
        """Takes note that a step is planned, in which each running answer gets a token."""

    def started(self, request: Request) -> None:
        """Takes note that a request runs, and has a block table."""

    def stopped(self, request: Request) -> None:
        """Takes note that a request does not run any more, if it did: it has ended or was preempted."""

    def ended(self, request: Request) -> None:
        """Takes note that an answer has ended that has run."""

    def n_expected(self, request: Request) -> int:
        """Returns how many pages running requests will need beyond those that they have, if ``request`` is admitted
        now."""
        return 0
