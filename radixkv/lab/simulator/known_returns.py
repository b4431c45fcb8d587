"""``KnownReturns``: the oracle of pauses, which knows when each conversation goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import nsmallest

from radixkv.runtime.pauses.pauses import MAX_SPARED
from radixkv.runtime.protocols.returns import NeededPrompt, Returns
from radixkv.tree.node import Namespace


@dataclass(eq=False, slots=True)
class _Return:
    namespace: Namespace
    key: bytes
    due: float


class KnownReturns(Returns):
    """Expects the next prompts of conversations that pause, the next one first, as many as a server spares."""

    def __init__(self) -> None:
        self._paused: dict[int, _Return] = {}
        """By index of the prompt that will go on."""

    def add(self, index: int, namespace: Namespace, prompt: bytes, due: float) -> None:
        """Expects a prompt at a time. O(1)."""
        self._paused[index] = _Return(namespace, prompt, due)

    def take(self, index: int) -> None:
        """Expects a prompt no longer, if it did. O(1)."""
        paused = self._paused.pop(index, None)
        if paused is not None:
            paused.key = b""

    def expected(self) -> Iterator[NeededPrompt]:
        """See ``Returns``. O(paused · log spared)."""
        yield from nsmallest(MAX_SPARED, self._paused.values(), key=lambda one: one.due)
