"""The copies of pages that another rank does for rank 0, in a thread."""

from __future__ import annotations

import contextlib

from radixkv.errors import RadixKVError
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
from radixkv.runtime.finished import wait_readable
from radixkv.runtime.step.executor import Executor
from radixkv.runtime.step.page_copier import PageCopier, SlotPart

_GROWTH_INTERVAL_S = 0.05
"""How often new slots are looked for while memory is being prepared."""


def serve_copies(executor: Executor, frames: Frames, memory: int) -> None:
    """Copies this rank's parts of pages for rank 0, until the stream ends; returns at once where there is no tier.

    Args:
        executor: of this rank.
        frames: to and from rank 0.
        memory: descriptor of the memory that the ranks share.
    """
    with contextlib.closing(frames):
        first = frames.receive()
        if first is None:
            return
        opened: RankMemory = decode(first, RankMemory)
        part = SlotPart(memory, opened.index, opened.n_parts, opened.stores, opened.rank, opened.n_ranks)
        try:
            copier = executor.open_copier(opened.n_bytes, part)
        except (RadixKVError, OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):  # rank 0 has ended
                frames.send(encode(RankRefused(str(error))))
            return
        with contextlib.closing(copier), contextlib.suppress(OSError):
            _copy(copier, frames)


def _copy(copier: PageCopier, frames: Frames) -> None:
    is_growing = copier.is_growing
    frames.send(encode(RankSlots(copier.take_new_slots().stop, is_growing)))
    tickets: dict[int, int] = {}
    """Rank 0's by this rank's."""
    while True:
        timeout_s = _GROWTH_INTERVAL_S if is_growing else None
        ready = wait_readable([frames.fileno(), copier.fileno()], timeout_s)
        if is_growing:
            is_growing = copier.is_growing
            new = copier.take_new_slots()
            if new or not is_growing:
                frames.send(encode(RankSlots(new.stop, is_growing)))
        for done in copier.take_finished():
            frames.send(encode(RankCopied(tickets.pop(done.ticket), done.seconds, done.error)))
        if frames.fileno() in ready:
            frame = frames.receive()
            if frame is None:
                return
            copy: RankCopy = decode(frame, RankCopy)
            slots, pages, states = copy.slots, copy.pages, copy.states
            load, store = copier.load, copier.store
            tickets[load(slots, pages, states) if copy.is_load else store(pages, slots, states)] = copy.ticket
