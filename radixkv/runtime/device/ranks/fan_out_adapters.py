"""``FanOutAdapters``: adapters that all ranks have, each its part of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from radixkv.errors import CheckpointError, DeviceError, DeviceLost, shortened
from radixkv.runtime.device.ranks.adapter_answers import AdapterAnswers
from radixkv.runtime.device.ranks.frames import (
    RankAdapterAnswer,
    RankAdapterCopy,
    RankAdapterDiscarded,
    RankAdapterFill,
    RankAdapterPut,
    RankAdapterRead,
    RankAdapterRemoved,
    RankAdapterWithdrawn,
    encode,
)
from radixkv.runtime.device.ranks.processes import RankProcesses
from radixkv.runtime.step.adapters import AdapterCopy, DeviceAdapters, ReadAdapter

Own = TypeVar("Own", ReadAdapter, AdapterCopy)


@dataclass(frozen=True)
class _OnAll(Generic[Own]):
    """What all ranks have read or copied, and put or discard together."""

    _ticket: int
    _own: Own
    _ranks: RankProcesses

    def put(self) -> None:
        """See ``ReadAdapter.put`` and ``AdapterCopy.put``. Plans that follow reach the other ranks after this."""
        self._ranks.send(encode(RankAdapterPut(self._ticket)))
        self._own.put()

    def discard(self) -> None:
        """See ``ReadAdapter.discard`` and ``AdapterCopy.discard``."""
        with suppress(DeviceLost):  # the other ranks have ended, with their memory
            self._ranks.send(encode(RankAdapterDiscarded(self._ticket)))
        self._own.discard()


@dataclass(frozen=True)
class _ReadByAll(_OnAll[ReadAdapter]):
    """A ``ReadAdapter`` that all ranks have read."""

    digest: str
    invocation_tokens: tuple[int, ...] | None
    n_bytes: int


@dataclass(frozen=True)
class _CopyOnAll(_OnAll[AdapterCopy]):
    """An ``AdapterCopy`` that all ranks do."""

    _adapters: FanOutAdapters

    def fill(self) -> None:
        """See ``AdapterCopy.fill``.

        Raises:
            DeviceError: another rank failed.
            DeviceLost: another rank has ended.
        """
        self._own.fill()
        self._adapters.ask(RankAdapterFill(self._ticket))


class FanOutAdapters:
    """``DeviceAdapters`` of ranks: rank 0's, and those of the others, which do what it does in the same order.

    Each rank reads the folder for itself. Rank 0 reads first: what it refuses, no other rank sees. Room that rank 0
    has freed, the others have freed before they are told to use it, because all frames have one way.

    Args:
        own: of rank 0.
        ranks: the others, ready.
    """

    def __init__(self, own: DeviceAdapters, ranks: RankProcesses) -> None:
        self.sizes = own.sizes
        """See ``DeviceAdapters.sizes``: those of rank 0, to which each other rank has equal ones."""
        self._own = own
        self._ranks = ranks
        self._tickets = count(1)
        self._answers = [
            AdapterAnswers(ranks.adapters[rank - 1], self._lost(rank)) for rank in range(1, ranks.size)
        ]
        """Answers of each other rank."""

    def read(self, name: str, path: str) -> ReadAdapter:
        """See ``DeviceAdapters.read``. Where a rank cannot read the adapter, no rank keeps it.

        Raises:
            CheckpointError: a rank cannot read the adapter, or not serve it, or has found other files.
            DeviceError: another rank failed, as for lack of memory.
            DeviceLost: another rank has ended.
        """
        own, ticket = self._own.read(name, path), next(self._tickets)
        everywhere = _ReadByAll(ticket, own, self._ranks, own.digest, own.invocation_tokens, own.n_bytes)
        try:
            answers = self.ask(RankAdapterRead(ticket, name, path))
            self._check(answers, name, own.digest)
        except BaseException:
            everywhere.discard()
            raise
        return everywhere

    def copy(self, digest: str) -> AdapterCopy:
        """See ``DeviceAdapters.copy``."""
        own, ticket = self._own.copy(digest), next(self._tickets)
        self._ranks.send(encode(RankAdapterCopy(ticket, digest)))
        return _CopyOnAll(ticket, own, self._ranks, self)

    def withdraw(self, digest: str) -> None:
        """See ``DeviceAdapters.withdraw``. Plans that were sent before reach the other ranks before this."""
        self._ranks.send(encode(RankAdapterWithdrawn(digest)))
        self._own.withdraw(digest)

    def ask(self, question: RankAdapterRead | RankAdapterFill) -> list[RankAdapterAnswer]:
        """Asks the other ranks, and returns what each has done. Any thread may call it, also beside others.

        Raises:
            DeviceError: a rank failed.
            DeviceLost: a rank has ended.
        """
        self._ranks.send(encode(question))
        # All answers are taken before one fails: a rank told to discard what it still reads would hold up plans.
        answers = [one.take(question.ticket) for one in self._answers]
        for rank, answer in enumerate(answers, 1):
            if answer.failure is not None:
                raise DeviceError(f"{self._ranks.name(rank)}: {answer.failure}")
        return answers

    def remove(self, digest: str) -> None:
        """See ``DeviceAdapters.remove``. Plans that were sent before reach the other ranks before this."""
        self._ranks.send(encode(RankAdapterRemoved(digest)))
        self._own.remove(digest)

    def _lost(self, rank: int) -> Callable[[], DeviceLost]:
        return lambda: self._ranks.lost(f"rank {rank} has ended", "a load or a copy of an adapter")

    def _check(self, answers: list[RankAdapterAnswer], name: str, digest: str) -> None:
        """Raises ``CheckpointError`` if a rank has not read what rank 0 has."""
        for rank, answer in enumerate(answers, 1):
            if answer.refusal is not None:
                raise CheckpointError(f"{self._ranks.name(rank)} cannot load what rank 0 can: {answer.refusal}")
            if answer.digest != digest:
                raise CheckpointError(
                    f"adapter {shortened(name)}: its files have changed while {self._ranks.name(rank)} read them "
                    "after rank 0; load it again"
                )
