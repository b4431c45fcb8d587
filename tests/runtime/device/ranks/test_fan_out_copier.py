"""Copies that all ranks do: when they have finished, and what of them a rank loses that ends."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.errors import ConfigError
from radixkv.runtime.device.collectives import COLLECTIVE_TIMEOUT_S
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
    n_state_slots = 0
    is_growing = False

    def __init__(self) -> None:
        self.finished = Finished[FinishedCopy]()
        self.usable = range(N_SLOTS)
        self.n_tickets = 0
        self.is_closed = False

    def take_new_slots(self) -> range:
        new, self.usable = self.usable, range(N_SLOTS, N_SLOTS)
        return new

    def load(self, slots: object, pages: object, states: object = ()) -> int:
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


@dataclass
class Opened:
    copier: FanOutCopier
    own: OwnCopier
    others: list[Frames]
    """The other ranks' ends."""
    losses: list[str]
    now_s: float = 0.0


@contextmanager
def opened(n_ranks: int, n_usable: int = N_SLOTS) -> Iterator[Opened]:
    own, losses = OwnCopier(), list[str]()
    pairs = [socket.socketpair() for _ in range(n_ranks - 1)]
    others = [Frames(other) for _, other in pairs]
    for frames in others:
        frames.send(encode(RankSlots(n_usable, is_growing=n_usable < N_SLOTS)))
    ours = [Frames(one, max_send_s=0.2) for one, _ in pairs]
    copier = FanOutCopier.open(own, ours, 128, list(range(n_ranks)), losses.append)
    for rank, frames in enumerate(others, 1):
        frame = frames.receive()
        assert frame is not None
        assert decode(frame, RankMemory) == RankMemory(128, rank, n_ranks, True, rank, n_ranks)
    state = Opened(copier, own, others, losses)
    copier._clock = lambda: state.now_s
    try:
        yield state
    finally:
        copier.close()
        for _, other in pairs:
            with suppress(OSError):
                other.shutdown(socket.SHUT_RDWR)
        for frames in others:
            frames.close()
    assert own.is_closed


def is_readable(copier: FanOutCopier) -> bool:
    return bool(select.select([copier.fileno()], [], [], 0)[0])


@given(st.integers(2, 4), st.lists(st.booleans(), min_size=1, max_size=5), st.data())
def test_a_copy_ends_once_when_all_ranks_have_done_it_or_one_is_lost(
    n_ranks: int, are_loads: list[bool], data: st.DataObject
) -> None:
    """Copies end in any order on each rank, and a rank dies between any two."""
    with opened(n_ranks) as state:
        copier = state.copier
        tickets = [
            copier.load([1], [2], [(3, 4)]) if is_load else copier.store([2], [1], [(3, 4)])
            for is_load in are_loads
        ]
        for frames in state.others:
            for ticket, is_load in zip(tickets, are_loads, strict=True):
                frame = frames.receive()
                assert frame is not None
                assert decode(frame, RankCopy) == RankCopy(ticket, is_load, [1], [2], [(3, 4)])
        waiting = {ticket: set(range(n_ranks)) for ticket in tickets}
        errors: dict[int, str | None] = dict.fromkeys(tickets)
        done: dict[int, FinishedCopy] = {}
        loss = None
        while any(waiting.values()):
            rank = data.draw(st.sampled_from(sorted(set().union(*waiting.values()))))
            mine = [ticket for ticket in tickets if rank in waiting[ticket]]
            if rank and data.draw(st.integers(0, 9)) == 0:
                state.others[rank - 1].close()
                loss = f"rank {rank} has ended"
                for ticket in tickets:
                    if waiting[ticket] - {0}:
                        errors[ticket] = errors[ticket] or loss
                    waiting[ticket] &= {0}
            else:
                ticket = data.draw(st.sampled_from(mine))
                error = data.draw(st.sampled_from([None, None, "the device is full"]))
                waiting[ticket].remove(rank)
                if rank == 0:
                    state.own.finished.add(FinishedCopy(ticket, 0.25, error))
                else:
                    state.others[rank - 1].send(encode(RankCopied(ticket, 0.5, error)))
                    error = error and f"rank {rank}: {error}"
                errors[ticket] = errors[ticket] or error
            assert is_readable(copier)
            for one in copier.take_finished():
                assert one.ticket not in done
                done[one.ticket] = one
            assert not is_readable(copier)
            assert done.keys() == {ticket for ticket in tickets if not waiting[ticket]}
        assert {ticket: one.error for ticket, one in done.items()} == errors
        assert state.losses == ([] if loss is None else [loss])
        assert loss is not None or all(one.seconds == 0.5 for one in done.values())
        later = copier.load([3], [4])
        state.own.finished.add(FinishedCopy(later, 0.25, None))
        assert [one.error for one in copier.take_finished()] == ([] if loss is None else [loss])


def test_all_that_has_come_is_taken_at_once() -> None:
    """A load waits for no turn of the loop that takes stores before it."""
    with opened(2) as state:
        tickets = []
        for _ in range(50):
            tickets.append(state.copier.store([1], [2]))
            state.others[0].receive()
        for ticket in tickets:
            state.own.finished.add(FinishedCopy(ticket, 0.0, None))
            state.others[0].send(encode(RankCopied(ticket, 0.0, None)))
        assert [one.ticket for one in state.copier.take_finished()] == tickets


def test_rank_0_may_have_finished_before_the_others_know_of_the_copy() -> None:
    with opened(2) as state:
        for start in (state.copier.load, state.copier.store):
            state.own.finished.add(FinishedCopy(state.own.n_tickets, 0.0, None))
            ticket = start([1], [2])
            state.others[0].send(encode(RankCopied(ticket, 0.0, None)))
            assert [one.ticket for one in state.copier.take_finished()] == [ticket]


def test_a_rank_whose_answers_nobody_takes_still_gets_copies() -> None:
    """Otherwise both would wait for each other with full streams."""
    served: list[int] = []

    def serve(frames: Frames) -> None:
        with suppress(OSError):
            while (frame := frames.receive()) is not None:
                served.append(decode(frame, RankCopy).ticket)
                frames.send(encode(RankCopied(served[-1], 0.0, None)))

    with opened(2) as state:
        serving = threading.Thread(target=serve, args=(state.others[0],))
        serving.start()
        for _ in range(1000):
            state.copier.store([1], [2])
        assert state.losses == []
    serving.join()
    assert served == list(range(len(served)))


def test_a_rank_that_does_not_copy_is_lost() -> None:
    with opened(3) as state:
        first, second = state.copier.load([1], [2]), state.copier.load([3], [4])
        state.now_s = 100.0  # rank 0 has not done it either
        assert state.copier.take_finished() == []
        state.own.finished.add(FinishedCopy(first, 0.1, None))
        state.others[0].send(encode(RankCopied(first, 0.1, None)))
        assert state.copier.take_finished() == []
        state.now_s = 99.0 + COLLECTIVE_TIMEOUT_S
        assert state.copier.take_finished() == []
        state.now_s = 101.0 + COLLECTIVE_TIMEOUT_S
        (lost,) = state.copier.take_finished()
        assert lost.ticket == first
        assert lost.error == f"rank 2 has not copied pages for {COLLECTIVE_TIMEOUT_S:g} s" == state.losses[0]
        state.own.finished.add(FinishedCopy(second, 0.1, None))
        assert [one.error for one in state.copier.take_finished()] == state.losses


def test_slots_are_usable_when_they_are_for_all_ranks() -> None:
    with opened(3, n_usable=2) as state:
        copier = state.copier
        assert copier.take_new_slots() == range(2)
        state.others[0].send(encode(RankSlots(8, is_growing=False)))
        assert copier.take_new_slots() == range(2, 2)
        state.others[1].send(encode(RankSlots(5, is_growing=True)))
        assert copier.take_new_slots() == range(2, 5)
        assert copier.is_growing
        state.others[1].send(encode(RankSlots(5, is_growing=False)))
        assert copier.take_new_slots() == range(5, 5)
        assert not copier.is_growing
        state.own.is_growing = True
        assert copier.is_growing


def test_no_slots_come_from_ranks_that_are_lost() -> None:
    with opened(3, n_usable=2) as state:
        assert state.copier.is_growing
        state.others[1].close()
        state.copier.take_new_slots()
        assert state.losses
        assert not state.copier.is_growing


def test_ranks_that_have_the_same_part_store_it_once() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    others = [Frames(other) for _, other in pairs]
    for frames in others:
        frames.send(encode(RankSlots(N_SLOTS, is_growing=False)))
    copier = FanOutCopier.open(OwnCopier(), [Frames(one) for one, _ in pairs], 128, [0, 0, 1, 1], print)
    opened = [decode(frames.receive() or b"", RankMemory) for frames in others]
    assert [(one.index, one.n_parts, one.stores) for one in opened] == [(0, 2, False), (1, 2, True), (1, 2, False)]
    copier.close()
    for frames in others:
        frames.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (encode(RankRefused("no memory is left")), "cannot be opened: rank 1: no memory is left"),
        (b"", "cannot be opened: rank 1 has ended"),
        (None, "cannot be opened: rank 1 does not answer for 0.1 s"),
    ],
)
def test_a_rank_that_cannot_open_its_memory_is_named(answer: bytes | None, message: str) -> None:
    ours, theirs = socket.socketpair()
    if answer:
        Frames(theirs).send(answer)
    elif answer is not None:
        theirs.shutdown(socket.SHUT_WR)
    own = OwnCopier()
    with theirs, pytest.raises(ConfigError, match=message):
        FanOutCopier.open(own, [Frames(ours)], 128, [0, 1], print, timeout_s=0.1)
    assert own.is_closed
