"""A fake page copier over the fake device: copies finish when a test says so, in any order, and may fail.

A copy reads its source and writes its destination only when it finishes; a state that it replaces is destroyed when
it begins. So a page or slot that is used by something else before that shows up: as another prefix, as a free page,
or overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from radixkv.runtime.step.page_copier import FinishedCopy
from support.fake_device import NAN, POISON, REJECTED, FakeDevice, KVValue

PAGE_BYTES = 1 << 10
COPY_S = 0.25


LOADING = (-1, -1)
"""What the slot of a state has while a copy writes it."""
STATE_PARTS = 2
"""Parts of a page's size that a state takes."""
FIRST_STATE = 1 << 20
"""Number of the first part of host slots for states, among those of ``slots``."""


def slot_of(buffer: memoryview) -> int:
    """Returns the slot whose ``buffer`` this is."""
    return int.from_bytes(buffer, "little")


class InWindow(NamedTuple):
    """What a slot has of a token of a window page."""

    value: Any


class Copy(NamedTuple):
    ticket: int
    is_load: bool
    pages: tuple[int, ...]
    slots: tuple[int, ...]
    states: tuple[tuple[int, int], ...]


@dataclass
class FakeCopier:
    """A ``PageCopier`` with slots in a dict."""

    device: FakeDevice
    n_slots: int
    n_state_slots: int = 0
    n_mapped_slots: int = 0
    page_bytes: int = PAGE_BYTES
    in_flight: list[Copy] = field(default_factory=list)
    slots: dict[int, list[Any]] = field(default_factory=dict)
    """By slot, what each token of a page has; and by part of a slot for a state, the state once for each token."""
    n_closed: int = 0
    is_growing: bool = False
    n_ready: int | None = None
    """Leading slots that are usable by now; None for all."""
    _finished: list[FinishedCopy] = field(default_factory=list)
    _n_taken: int = 0
    _n_tickets: int = 0

    def take_new_slots(self) -> range:
        first, self._n_taken = self._n_taken, self.n_slots if self.n_ready is None else self.n_ready
        return range(first, self._n_taken)

    def buffer(self, slot: int) -> memoryview:
        """Returns what ``slot_of`` takes: the fake slots hold no bytes."""
        return memoryview(slot.to_bytes(4, "little"))

    def state_buffers(self, slot: int) -> list[memoryview]:
        """Returns what ``slot_of`` takes, for each part of a slot for a state."""
        return [self.buffer(FIRST_STATE + slot * STATE_PARTS + part) for part in range(STATE_PARTS)]

    def load(self, slots: Sequence[int], pages: Sequence[int], states: Sequence[tuple[int, int]] = ()) -> int:
        return self._begin(True, pages, slots, states)

    def store(self, pages: Sequence[int], slots: Sequence[int], states: Sequence[tuple[int, int]] = ()) -> int:
        return self._begin(False, pages, slots, states)

    def take_finished(self) -> list[FinishedCopy]:
        finished, self._finished = self._finished, []
        return finished

    def fileno(self) -> int:
        raise NotImplementedError("tests do not wait for copies; they finish them")

    def close(self) -> None:
        self.n_closed += 1

    def finish(self, which: int = 0, *, fails: bool = False) -> None:
        """Finishes a copy in flight; a failed one leaves half of its destination written."""
        if not self.in_flight:
            return
        copy = self.in_flight.pop(which % len(self.in_flight))
        pairs = list(zip(copy.pages, copy.slots, strict=True))
        for page, slot in pairs[: len(pairs) // 2] if fails else pairs:
            if copy.is_load:
                self._write_page(page, self.slots[slot])
            else:
                self.slots[slot] = self._read_page(page)
        if self.device.mixed_window is not None:
            self._copy_windows(copy.is_load, copy.states[: len(copy.states) // 2] if fails else copy.states)
        for slot, tree_slot in () if fails or self.device.mixed_window is not None else copy.states:
            first = FIRST_STATE + slot * STATE_PARTS
            if copy.is_load:
                (state,) = {one for part in range(STATE_PARTS) for one in self.slots[first + part]}
                assert state != POISON, f"state {slot} is loaded, and not filled"
                self.device.tree_states[tree_slot] = state
            else:
                state = self.device.tree_states[tree_slot]
                assert state[1] is not None, f"state {tree_slot} is stored, and not finite"
                for part in range(STATE_PARTS):
                    self.slots[first + part] = [state] * self.device.page_size
        self._finished.append(FinishedCopy(copy.ticket, COPY_S, "the copy failed" if fails else None))

    def finish_all(self) -> None:
        while self.in_flight:
            self.finish()

    def _begin(
        self, is_load: bool, pages: Sequence[int], slots: Sequence[int], states: Sequence[tuple[int, int]]
    ) -> int:
        assert len(pages) == len(slots), "a copy of unlike numbers"
        assert pages or states, "a copy of nothing"
        assert len(set(slots)) == len(slots), "a slot twice in one copy"
        n_slots = self.n_slots + (self.n_mapped_slots if is_load else 0)
        assert all(slot < n_slots for slot in slots), "no such slot"
        self._n_tickets += 1
        assert len({slot for slot, _ in states}) == len(states), "a state twice in one copy"
        # A copy may write at once, before steps that are planned or launched.
        if is_load and self.device.mixed_window is None:
            self.device.tree_states |= {tree_slot: LOADING for _, tree_slot in states}
        self.in_flight.append(Copy(self._n_tickets, is_load, tuple(pages), tuple(slots), tuple(states)))
        return self._n_tickets

    def _copy_windows(self, is_load: bool, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies window pages: one takes the place of the slots of a slab, each of which then has all of it."""
        device, offsets = self.device, range(self.device.page_size)
        for slab, page in pairs:
            assert page not in device.free_windows, f"window page {page} is copied, and free"
            slots = range(slab * device.pages_per_slab, (slab + 1) * device.pages_per_slab)
            assert slots.stop <= self.n_slots, "no such slab"
            if is_load:
                for offset in offsets:
                    parts = [self.slots[slot][offset] for slot in slots]
                    values = [part.value for part in parts if isinstance(part, InWindow)]
                    assert len(values) == len(parts), f"slab {slab} is loaded as a window page"
                    # A store evicts parts one by one: they may be of the same tokens, computed at different times.
                    assert len({value._replace(n_executed=0) for value in values}) == 1, "parts of different tokens"
                    assert device.windows.get((page, offset)) in (None, POISON), "a load overwrites a live window"
                    device.windows[page, offset] = min(values, key=attrgetter("n_executed"))
            else:
                computed = [device.windows.get((page, offset)) for offset in offsets]
                assert not {None, POISON, NAN, REJECTED} & set(computed), f"window page {page} is not computed"
                for slot in slots:
                    self.slots[slot] = [InWindow(value) for value in computed]

    def _read_page(self, page: int) -> list[KVValue | str | None]:
        assert page not in self.device.free_pages, f"page {page} is stored, and free"
        values = [self.device.kv.get((page, offset)) for offset in range(self.device.page_size)]
        assert not {None, POISON, NAN, REJECTED} & set(values), f"page {page} is stored, and not computed"
        return values

    def _write_page(self, page: int, values: list[KVValue | str | None]) -> None:
        assert page not in self.device.free_pages, f"page {page} is loaded, and free"
        assert POISON not in values, f"page {page} is loaded from a slot that is not filled"
        for offset, value in enumerate(values):
            assert self.device.kv.get((page, offset)) in (None, POISON), "a load overwrites live KV"
            assert value is not None
            assert not isinstance(value, InWindow), f"page {page} is loaded from a window page"
            self.device.kv[page, offset] = value
