"""Copies that all ranks do: when they have finished, and what of them a rank loses that ends."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.errors import ConfigError
from radixkv.runtime.device.ranks.fan_out_copier import FanOutCopier
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
from radixkv.runtime.finished import Finished
from radixkv.runtime.step.page_copier import FinishedCopy

N_SLOTS = 8


class OwnCopier:
    """Rank 0's copier, whose copies end when the test says so."""

    n_slots = N_SLOTS
    page_bytes = 16

    def __init__(self) -> None:
        self.finished = Finished[FinishedCopy]()
        self.usable = range(N_SLOTS)
        self.n_tickets = 0
        self.is_closed = False

    def take_new_slots(self) -> range:
        new, self.usable = self.usable, range(N_SLOTS, N_SLOTS)
        return new

    def load(self, slots: object, pages: object) -> int:
        self.n_tickets += 1
        return self.n_tickets - 1

    store = load

    def take_finished(self) -> list[FinishedCopy]:
        return self.finished.take()

    def fileno(self) -> int:
        return self.finished.fileno()

    def buffer(self, slot: int) -> memoryview:
        return memoryview(bytearray(16))

    def close(self) -> None:
        self.is_closed = True
        self.finished.close()


@contextmanager
def opened(n_ranks: int, n_usable: int = N_SLOTS) -> Iterator[tuple[FanOutCopier, OwnCopier, list[Frames]]]:
    own = OwnCopier()
    pairs = [socket.socketpair() for _ in range(n_ranks - 1)]
    others = [Frames(other) for _, other in pairs]
    for frames in others:
        frames.send(encode(RankSlots(n_usable)))
    copier = FanOutCopier.open(own, [Frames(one) for one, _ in pairs], 128, list(range(n_ranks)))
    for rank, frames in enumerate(others, 1):
        frame = frames.receive()
        assert frame is not None
        assert decode(frame, RankMemory) == RankMemory(128, rank, n_ranks, True)
    try:
        yield copier, own, others
    finally:
        copier.close()
        for frames in others:
            frames.close()
    assert own.is_closed


def is_readable(copier: FanOutCopier) -> bool:
    return bool(select.select([copier.fileno()], [], [], 0)[0])


@given(st.integers(2, 4), st.lists(st.booleans(), min_size=1, max_size=5), st.data())
def test_a_copy_ends_once_when_all_ranks_have_done_it_or_ended(
    n_ranks: int, are_loads: list[bool], data: st.DataObject
) -> None:
    """Copies end in any order on each rank, and ranks die between any two."""
    with opened(n_ranks) as (copier, own, others):
        tickets = [copier.load([1], [2]) if is_load else copier.store([2], [1]) for is_load in are_loads]
        for frames in others:
            for ticket, is_load in zip(tickets, are_loads, strict=True):
                frame = frames.receive()
                assert frame is not None
                assert decode(frame, RankCopy) == RankCopy(ticket, is_load, [1], [2])
        waiting = {ticket: set(range(n_ranks)) for ticket in tickets}
        errors: dict[int, bool] = dict.fromkeys(tickets, False)
        dead: set[int] = set()
        done: dict[int, FinishedCopy] = {}
        while any(waiting.values()):
            rank = data.draw(st.sampled_from(sorted(set().union(*waiting.values()))))
            mine = [ticket for ticket in tickets if rank in waiting[ticket]]
            if rank and data.draw(st.integers(0, 9)) == 0:
                others[rank - 1].close()
                dead.add(rank)
                for ticket in mine:
                    waiting[ticket].remove(rank)
                    errors[ticket] = True
            else:
                ticket = data.draw(st.sampled_from(mine))
                error = data.draw(st.sampled_from([None, None, "the device is full"]))
                waiting[ticket].remove(rank)
                errors[ticket] |= error is not None
                if rank == 0:
                    own.finished.add(FinishedCopy(ticket, 0.25, error))
                else:
                    others[rank - 1].send(encode(RankCopied(ticket, 0.5, error)))
            assert is_readable(copier)
            for one in copier.take_finished():
                assert one.ticket not in done
                done[one.ticket] = one
            while is_readable(copier):
                assert copier.take_finished() == []
            assert done.keys() == {ticket for ticket in tickets if not waiting[ticket]}
        for ticket, one in done.items():
            assert (one.error is not None) == errors[ticket]
            assert one.seconds == 0.5 or dead
        later = copier.load([3], [4])
        own.finished.add(FinishedCopy(later, 0.25, None))
        assert bool(copier.take_finished()) == (len(dead) == n_ranks - 1)


def test_slots_are_usable_when_they_are_for_all_ranks() -> None:
    with opened(3, n_usable=2) as (copier, _, others):
        assert copier.take_new_slots() == range(2)
        others[0].send(encode(RankSlots(8)))
        assert copier.take_new_slots() == range(2, 2)
        others[1].send(encode(RankSlots(5)))
        assert copier.take_new_slots() == range(2, 5)


def test_ranks_that_have_the_same_part_store_it_once() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    others = [Frames(other) for _, other in pairs]
    for frames in others:
        frames.send(encode(RankSlots(N_SLOTS)))
    copier = FanOutCopier.open(OwnCopier(), [Frames(one) for one, _ in pairs], 128, [0, 0, 1, 1])
    opened = [decode(frames.receive() or b"", RankMemory) for frames in others]
    assert [(one.index, one.n_parts, one.stores) for one in opened] == [(0, 2, False), (1, 2, True), (1, 2, False)]
    copier.close()
    for frames in others:
        frames.close()


@pytest.mark.parametrize(
    ("answer", "message"), [("no memory is left", "rank 1: no memory is left"), (None, "its stream has ended")]
)
def test_a_rank_that_cannot_open_its_memory_is_named(answer: str | None, message: str) -> None:
    ours, theirs = socket.socketpair()
    if answer is not None:
        Frames(theirs).send(encode(RankRefused(answer)))
    theirs.shutdown(socket.SHUT_WR)
    own = OwnCopier()
    with pytest.raises(ConfigError, match=message), theirs:
        FanOutCopier.open(own, [Frames(ours)], 128, [0, 1])
    assert own.is_closed
    ours.close()
