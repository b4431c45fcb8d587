"""The protocol of the branch ``pauses``: conversations that are expected back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from radixkv.tree.node import Namespace
from radixkv.wire.stats import PauseStats


class NeededPrompt(Protocol):
    """A prompt that will be looked up, whether a request with it waits already or not."""

    @property
    def namespace(self) -> Namespace:
        """Its namespace."""

    @property
    def key(self) -> bytes:
        """Its tokens, little-endian int32: one object as long as it is needed, none once it is not."""


class Returns:
    """The conversations that are expected back, though no request of theirs waits.

    This class is the protocol and its default, which expects none. O(1) each.
    """

    def expected(self) -> Iterable[NeededPrompt]:
        """Yields what their next prompts begin with, those first whose pages are worth most."""
        return ()

    def close_session(self, namespace: Namespace, session_id: str) -> None:
        """Takes note that nobody goes on with the conversations of a session."""

    def stats(self) -> PauseStats | None:
        """Returns counters and gauges of pauses between turns; None if nobody looks for them."""
        return None
