"""``FanOutCopier``: a copier whose copies all ranks do."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixkv.errors import ConfigError
from radixkv.runtime.device.collectives import COLLECTIVE_TIMEOUT_S
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
from radixkv.runtime.finished import Finished, wait_readable
from radixkv.runtime.step.page_copier import FinishedCopy, HostMemoryCopier, MappedSlots

_OWN = 0
"""Rank 0, which this process is."""
_MAX_OPEN_S = 600.0
"""How long a rank may take to open its copier, which compiles kernels at the first start."""
_CHECK_INTERVAL_S = 1.0


class FanOutCopier:
    """A ``HostMemoryCopier`` of slots in memory that ranks share, of which each copies its part of a page or state.

    A copy has finished when all ranks have, and has failed if one has; a slot is usable when it is for all. A rank
    that has ended, or that takes half an hour longer than rank 0 for a copy, is lost with the device: all copies
    fail from then on.

    Args:
        copier: of rank 0; closed with this object.
        ranks: streams to the other ranks, whose copiers are open; closed with this object.
        on_loss: called once with the reason when a rank is lost.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        copier: HostMemoryCopier,
        ranks: Sequence[Frames],
        on_loss: Callable[[str], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.n_slots = copier.n_slots
        self.n_mapped_slots = 0
        self.n_state_slots = copier.n_state_slots
        self.page_bytes = copier.page_bytes
        self._copier = copier
        self._ranks = dict(enumerate(ranks, 1))
        self._on_loss = on_loss
        self._clock = clock
        self._loss: str | None = None
        """Why copies fail; None: they do not."""
        self._n_usable = dict.fromkeys([_OWN, *self._ranks], 0)
        self._growing: set[int] = set()
        """Other ranks that may be able to use more slots later."""
        self._n_taken = 0
        self._copies: dict[int, _Copy] = {}
        self._finished = Finished[FinishedCopy]()
        self._next_check_at = 0.0
        self._poll = select.epoll()
        for descriptor in (copier.fileno(), self._finished.fileno(), *(frames.fileno() for frames in ranks)):
            self._poll.register(descriptor, select.EPOLLIN)

    @classmethod
    def open(
        cls,
        copier: HostMemoryCopier,
        ranks: Sequence[Frames],
        n_bytes: int,
        parts: Sequence[int],
        on_loss: Callable[[str], object],
        *,
        timeout_s: float = _MAX_OPEN_S,
    ) -> FanOutCopier:
        """Opens the other ranks' copiers.

        Args:
            copier: of rank 0, of its part of the shared memory.
            ranks: streams to the other ranks.
            n_bytes: size of the memory.
            parts: which part of a slot each rank has, rank 0's first; ranks may have the same.
            on_loss: see ``FanOutCopier``.
            timeout_s: how long a rank may take.

        Raises:
            ConfigError: a rank refuses, has ended, or takes longer.
        """
        opened = cls(copier, ranks, on_loss)
        try:
            for rank, (frames, part) in enumerate(zip(ranks, parts[1:], strict=True), 1):
                stores = part not in parts[:rank]
                frames.send(encode(RankMemory(n_bytes, part, parts[-1] + 1, stores, rank, len(parts))))
            for rank, frames in enumerate(ranks, 1):
                if not wait_readable([frames.fileno()], timeout_s):
                    raise OSError(f"rank {rank} does not answer for {timeout_s:g} s")
                if (frame := frames.receive()) is None:
                    raise OSError(f"rank {rank} has ended; the lines before say why")
                answer = decode(frame, RankSlots | RankRefused)
                if isinstance(answer, RankRefused):
                    raise OSError(f"rank {rank}: {answer.message}")
                opened._take_slots(rank, answer)
        except OSError as error:
            opened.close()
            raise ConfigError(f"the host memory that ranks share cannot be opened: {error}") from None
        return opened

    @property
    def is_growing(self) -> bool:
        """See ``PageCopier.is_growing``."""
        return self._copier.is_growing or bool(self._growing)

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

    def state_buffers(self, slot: int) -> list[memoryview]:
        """See ``HostMemoryCopier.state_buffers``."""
        return self._copier.state_buffers(slot)

    def map_slots(self, mapped: MappedSlots) -> None:
        """Leaves ``n_mapped_slots`` 0: the other ranks, which have a part of each page, have not mapped it."""

    def load(self, slots: Sequence[int], pages: Sequence[int], states: Sequence[tuple[int, int]] = ()) -> int:
        """See ``PageCopier.load``."""
        return self._start(self._copier.load(slots, pages, states), slots, pages, states, is_load=True)

    def store(self, pages: Sequence[int], slots: Sequence[int], states: Sequence[tuple[int, int]] = ()) -> int:
        """See ``PageCopier.store``."""
        return self._start(self._copier.store(pages, slots, states), slots, pages, states, is_load=False)

    def take_finished(self) -> list[FinishedCopy]:
        """See ``PageCopier.take_finished``."""
        self._receive()
        return self._finished.take()

    def fileno(self) -> int:
        """See ``PageCopier.fileno``. It is readable, too, where only some ranks have finished a copy."""
        return self._poll.fileno()

    def close(self) -> None:
        """See ``PageCopier.close``; the other ranks do so when their streams end."""
        self._poll.close()
        for frames in self._ranks.values():
            frames.close()
        self._copier.close()
        self._finished.close()

    def _start(
        self,
        ticket: int,
        slots: Sequence[int],
        pages: Sequence[int],
        states: Sequence[tuple[int, int]],
        *,
        is_load: bool,
    ) -> int:
        self._copies[ticket] = _Copy({_OWN, *self._ranks}, error=self._loss)  # rank 0's may have finished by now
        self._receive()  # a rank whose answers are not read would read no more copies at some time
        frame = encode(RankCopy(ticket, is_load, list(slots), list(pages), list(states)))
        for rank, frames in list(self._ranks.items()):
            try:
                frames.send(frame)
            except OSError as error:
                self._lose(f"rank {rank} takes no copies: {error}")
                break
        return ticket

    def _receive(self) -> None:
        """Takes all that has come from the ranks."""
        for done in self._copier.take_finished():
            self._end(done.ticket, _OWN, done.seconds, done.error)
        while ready := {descriptor for descriptor, _ in self._poll.poll(0)}:
            sent = {rank: frames for rank, frames in self._ranks.items() if frames.fileno() in ready}
            if not sent:
                break
            for rank, frames in sent.items():
                if (frame := frames.receive()) is None:
                    self._lose(f"rank {rank} has ended")
                    return
                message = decode(frame, RankSlots | RankCopied)
                if isinstance(message, RankSlots):
                    self._take_slots(rank, message)
                else:
                    error = message.error and f"rank {rank}: {message.error}"
                    self._end(message.ticket, rank, message.seconds, error)
        now_s = self._clock()
        if now_s >= self._next_check_at:
            self._next_check_at = now_s + _CHECK_INTERVAL_S
            self._check_times(now_s)

    def _take_slots(self, rank: int, slots: RankSlots) -> None:
        self._n_usable[rank] = slots.n_usable
        (self._growing.add if slots.is_growing else self._growing.discard)(rank)

    def _check_times(self, now_s: float) -> None:
        for copy in self._copies.values():
            if copy.own_end_s is not None and now_s - copy.own_end_s > COLLECTIVE_TIMEOUT_S:
                self._lose(f"rank {min(copy.ranks)} has not copied pages for {COLLECTIVE_TIMEOUT_S:g} s")
                return

    def _lose(self, reason: str) -> None:
        """Fails all copies; those that rank 0 does now end when it has done them."""
        self._loss = reason
        for frames in self._ranks.values():
            self._poll.unregister(frames.fileno())
            frames.close()
        lost, self._ranks = list(self._ranks), {}
        self._growing.clear()
        for ticket, copy in list(self._copies.items()):
            for rank in copy.ranks & set(lost):
                self._end(ticket, rank, 0.0, reason)
        self._on_loss(reason)

    def _end(self, ticket: int, rank: int, seconds: float, error: str | None) -> None:
        """Notes a rank's end of a copy."""
        copy = self._copies[ticket]
        copy.ranks.remove(rank)
        copy.seconds = max(copy.seconds, seconds)
        copy.error = copy.error or error
        if rank == _OWN:
            copy.own_end_s = self._clock()
        if not copy.ranks:
            del self._copies[ticket]
            self._finished.add(FinishedCopy(ticket, copy.seconds, copy.error))


@dataclass
class _Copy:
    ranks: set[int]
    """That have not finished."""
    seconds: float = 0.0
    error: str | None = None
    own_end_s: float | None = None
    """When rank 0 had finished; None: it has not."""
