"""``FanOutCopier``: a copier whose copies all ranks do."""

from __future__ import annotations

import select
from collections.abc import Sequence
from dataclasses import dataclass, field

from radixkv.errors import ConfigError
from radixkv.runtime.device.ranks.frames import (
    Frames,
    RankCopied,
    RankCopy,
    RankMemory,
    RankRefused,
    RankSlots,
    decode,
    encode,
)
from radixkv.runtime.step.page_copier import FinishedCopy, HostMemoryCopier

_OWN = 0
"""Rank 0, which this process is."""


class FanOutCopier:
    """A ``HostMemoryCopier`` of slots in memory that ranks share, of which each copies its part of a page.

    A copy has finished when all ranks have, and has failed if one has; a slot is usable when it is for all. Copies
    that a rank has not done when it ends fail, and so do all later ones.

    Args:
        copier: of rank 0; closed with this object.
        ranks: streams to the other ranks, whose copiers are open; closed with this object.
    """

    def __init__(self, copier: HostMemoryCopier, ranks: Sequence[Frames]) -> None:
        self.n_slots = copier.n_slots
        self.page_bytes = copier.page_bytes
        self._copier = copier
        self._ranks = dict(enumerate(ranks, 1))
        self._n_usable = dict.fromkeys([_OWN, *self._ranks], 0)
        self._n_taken = 0
        self._copies: dict[int, _Copy] = {}
        self._finished: list[FinishedCopy] = []
        self._poll = select.epoll()
        self._poll.register(copier.fileno(), select.EPOLLIN)
        for frames in ranks:
            self._poll.register(frames.fileno(), select.EPOLLIN)

    @classmethod
    def open(
        cls, copier: HostMemoryCopier, ranks: Sequence[Frames], n_bytes: int, parts: Sequence[int]
    ) -> FanOutCopier:
        """Opens the other ranks' copiers.

        Args:
            copier: of rank 0, of its part of the shared memory.
            ranks: streams to the other ranks.
            n_bytes: size of the memory.
            parts: which part of a slot each rank has, rank 0's first; ranks may have the same.

        Raises:
            ConfigError: a rank refuses, or has ended.
        """
        try:
            for rank, (frames, part) in enumerate(zip(ranks, parts[1:], strict=True), 1):
                frames.send(encode(RankMemory(n_bytes, part, parts[-1] + 1, stores=part not in parts[:rank])))
            opened = cls(copier, ranks)
            for rank, frames in enumerate(ranks, 1):
                answer = frames.receive()
                if answer is None:
                    raise OSError("its stream has ended")
                message = decode(answer, RankSlots | RankRefused)
                if isinstance(message, RankRefused):
                    raise ConfigError(f"rank {rank}: {message.message}")
                opened._n_usable[rank] = message.n_usable
        except OSError as error:
            copier.close()
            raise ConfigError(f"the host memory of the ranks cannot be opened: {error}") from None
        except ConfigError:
            copier.close()
            raise
        return opened

    def take_new_slots(self) -> range:
        """See ``PageCopier.take_new_slots``."""
        self._receive()
        if new := self._copier.take_new_slots():
            self._n_usable[_OWN] = new.stop
        first, self._n_taken = self._n_taken, min(self._n_usable.values())
        return range(first, self._n_taken)

    def buffer(self, slot: int) -> memoryview:
        """See ``HostMemoryCopier.buffer``."""
        return self._copier.buffer(slot)

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> int:
        """See ``PageCopier.load``."""
        return self._start(self._copier.load(slots, pages), slots, pages, is_load=True)

    def store(self, pages: Sequence[int], slots: Sequence[int]) -> int:
        """See ``PageCopier.store``."""
        return self._start(self._copier.store(pages, slots), slots, pages, is_load=False)

    def take_finished(self) -> list[FinishedCopy]:
        """See ``PageCopier.take_finished``."""
        self._receive()
        finished, self._finished = self._finished, []
        return finished

    def fileno(self) -> int:
        """See ``PageCopier.fileno``. It may be readable where only some ranks have finished."""
        return self._poll.fileno()

    def close(self) -> None:
        """See ``PageCopier.close``; the other ranks do so when their streams end."""
        self._poll.close()
        for frames in self._ranks.values():
            frames.close()
        self._copier.close()

    def _start(self, ticket: int, slots: Sequence[int], pages: Sequence[int], *, is_load: bool) -> int:
        self._copies[ticket] = _Copy(set(self._n_usable))
        frame = encode(RankCopy(ticket, is_load, list(slots), list(pages)))
        for rank in list(self._n_usable)[1:]:
            try:
                if rank not in self._ranks:
                    raise BrokenPipeError
                self._ranks[rank].send(frame)
            except OSError:
                self._lose(rank)
        return ticket

    def _receive(self) -> None:
        """Takes what has come from all ranks."""
        for done in self._copier.take_finished():
            self._end(done.ticket, _OWN, done.seconds, done.error)
        ready = {descriptor for descriptor, _ in self._poll.poll(0)}
        for rank, frames in list(self._ranks.items()):
            if frames.fileno() not in ready:
                continue
            frame = frames.receive()
            if frame is None:
                self._lose(rank)
                continue
            message = decode(frame, RankSlots | RankCopied)
            if isinstance(message, RankSlots):
                self._n_usable[rank] = message.n_usable
            else:
                self._end(message.ticket, rank, message.seconds, message.error)

    def _lose(self, rank: int) -> None:
        """Ends the copies that a rank which has ended cannot do."""
        if (frames := self._ranks.pop(rank, None)) is not None:
            self._poll.unregister(frames.fileno())
            frames.close()
        for ticket in [ticket for ticket, copy in self._copies.items() if rank in copy.ranks]:
            self._end(ticket, rank, 0.0, f"rank {rank} has ended")

    def _end(self, ticket: int, rank: int, seconds: float, error: str | None) -> None:
        """Notes a rank's end of a copy."""
        copy = self._copies[ticket]
        copy.ranks.remove(rank)
        copy.seconds = max(copy.seconds, seconds)
        copy.error = copy.error or error
        if not copy.ranks:
            del self._copies[ticket]
            self._finished.append(FinishedCopy(ticket, copy.seconds, copy.error))


@dataclass
class _Copy:
    ranks: set[int]
    """That have not finished."""
    seconds: float = 0.0
    error: str | None = field(default=None)
