"""``FanOutAdapters``: adapters that all ranks have, each its part of them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from threading import Lock

from radixkv.errors import CheckpointError, DeviceError, DeviceLost, shortened
from radixkv.runtime.device.ranks.frames import (
    RankAdapterCopy,
    RankAdapterDiscarded,
    RankAdapterFill,
    RankAdapterOpened,
    RankAdapterPut,
    RankAdapterRead,
    RankAdapterRemoved,
    RankAdapterWithdrawn,
    decode,
    encode,
)
from radixkv.runtime.device.ranks.processes import RankProcesses
from radixkv.runtime.step.adapters import AdapterCopy, DeviceAdapters, ReadAdapter


@dataclass(frozen=True)
class _ReadByAll:
    """A ``ReadAdapter`` that all ranks have read."""

    digest: str
    invocation_tokens: tuple[int, ...] | None
    n_bytes: int
    _ticket: int
    _own: ReadAdapter
    _ranks: RankProcesses

    def put(self) -> None:
        """See ``ReadAdapter.put``. Plans that follow reach the other ranks after this."""
        self._ranks.send(encode(RankAdapterPut(self._ticket)))
        self._own.put()

    def discard(self) -> None:
        """See ``ReadAdapter.discard``."""
        with suppress(DeviceLost):  # the other ranks have ended, with their memory
            self._ranks.send(encode(RankAdapterDiscarded(self._ticket)))
        self._own.discard()


@dataclass(frozen=True)
class _CopyOnAll:
    """An ``AdapterCopy`` that all ranks do."""

    _ticket: int
    _own: AdapterCopy
    _adapters: FanOutAdapters
    _ranks: RankProcesses

    def fill(self) -> None:
        """See ``AdapterCopy.fill``.

        Raises:
            DeviceError: another rank failed.
            DeviceLost: another rank has ended.
        """
        self._own.fill()
        self._adapters.ask(encode(RankAdapterFill(self._ticket)))

    def put(self) -> None:
        """See ``AdapterCopy.put``. Plans that follow reach the other ranks after this."""
        self._ranks.send(encode(RankAdapterPut(self._ticket)))
        self._own.put()

    def discard(self) -> None:
        """See ``AdapterCopy.discard``."""
        with suppress(DeviceLost):  # the other ranks have ended, with their memory
            self._ranks.send(encode(RankAdapterDiscarded(self._ticket)))
        self._own.discard()


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
        """See ``DeviceAdapters.sizes``. Of rank 0; those of each other rank are equal."""
        self._own = own
        self._ranks = ranks
        self._tickets = count(1)
        self._one_question = Lock()
        """Held while the other ranks read or copy, so that their answers are those to one frame."""

    def read(self, name: str, path: str) -> ReadAdapter:
        """See ``DeviceAdapters.read``. Where a rank cannot read the adapter, no rank keeps it.

        Raises:
            CheckpointError: a rank cannot read the adapter, or not serve it, or has found other files.
            DeviceError: another rank failed, as for lack of memory.
            DeviceLost: another rank has ended.
        """
        own, ticket = self._own.read(name, path), next(self._tickets)
        everywhere = _ReadByAll(own.digest, own.invocation_tokens, own.n_bytes, ticket, own, self._ranks)
        try:
            answers = self.ask(encode(RankAdapterRead(ticket, name, path)))
            self._check(answers, name, own.digest)
        except BaseException:
            everywhere.discard()
            raise
        return everywhere

    def copy(self, digest: str) -> AdapterCopy:
        """See ``DeviceAdapters.copy``."""
        own, ticket = self._own.copy(digest), next(self._tickets)
        self._ranks.send(encode(RankAdapterCopy(ticket, digest)))
        return _CopyOnAll(ticket, own, self, self._ranks)

    def withdraw(self, digest: str) -> None:
        """See ``DeviceAdapters.withdraw``. Plans that were sent before reach the other ranks before this."""
        self._ranks.send(encode(RankAdapterWithdrawn(digest)))
        self._own.withdraw(digest)

    def ask(self, frame: bytes) -> list[RankAdapterOpened]:
        """Sends a frame to the other ranks, and returns what each has done. Any thread may call it.

        Raises:
            DeviceError: a rank failed.
            DeviceLost: a rank has ended.
        """
        with self._one_question:
            self._ranks.send(frame)
            # All answers are taken before one fails: the next question must not find them.
            answers = [self._answer(rank) for rank in range(1, self._ranks.size)]
        for rank, answer in enumerate(answers, 1):
            if answer.failure is not None:
                raise DeviceError(f"{self._ranks.name(rank)}: {answer.failure}")
        return answers

    def remove(self, digest: str) -> None:
        """See ``DeviceAdapters.remove``. Plans that were sent before reach the other ranks before this."""
        self._ranks.send(encode(RankAdapterRemoved(digest)))
        self._own.remove(digest)

    def _answer(self, rank: int) -> RankAdapterOpened:
        frame = self._ranks.adapters[rank - 1].receive()
        if frame is None:
            raise self._ranks.lost(f"rank {rank} has ended", "a load or a copy of an adapter")
        answer: RankAdapterOpened = decode(frame, RankAdapterOpened)
        return answer

    def _check(self, answers: list[RankAdapterOpened], name: str, digest: str) -> None:
        """Raises ``CheckpointError`` if a rank has not read what rank 0 has."""
        for rank, answer in enumerate(answers, 1):
            if answer.refusal is not None:
                raise CheckpointError(f"{self._ranks.name(rank)} cannot load what rank 0 can: {answer.refusal}")
            if answer.digest != digest:
                raise CheckpointError(
                    f"adapter {shortened(name)}: its files have changed while {self._ranks.name(rank)} read them "
                    "after rank 0; load it again"
                )
