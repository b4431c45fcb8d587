"""A fake page store over the slots of a fake copier: transfers finish when a test says so, in any order.

As with the fake copier, a transfer reads its source and writes its destination only when it finishes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from radixkv.runtime.step.page_copier import MappedSlots
from radixkv.runtime.tiers.stores.page_keys import DIGEST_BYTES, StateKeys
from radixkv.runtime.tiers.stores.page_store import FinishedTransfer, PageCounts, Removal, StoreHealth
from support.fake_copier import PAGE_BYTES, FakeCopier, slot_of
from support.fake_device import POISON, KVValue

TRANSFER_S = 0.5
N_MAPPED_SLOTS = 1000
MAX_LENT_PAGES = 24
N_LOANS_A_REFUSAL = 4
"""One in so many loans is refused."""


class StoredPage(NamedTuple):
    tokens: bytes
    values: list[KVValue | str | None]


class Transfer(NamedTuple):
    ticket: int
    keys: list[bytes]
    tokens: list[bytes]
    """Of each page."""
    slots: list[int]
    sources: list[list[KVValue | str | None]] | None
    """For a store, what the slots had when it began; None for a load."""
    n_removals: int
    is_look_up: bool = False
    first: int = 0
    """This and what follows are of a lookup."""
    states: StateKeys | None = None


@dataclass
class FakeStore:
    """A ``PageStore`` with pages in a dict, of the order in which they were stored, and a ``PageLender``."""

    copier: FakeCopier
    is_shared: bool = False
    """Whether ``run`` has to be told by ``look_up`` what other servers have stored."""
    page_bytes: int = PAGE_BYTES
    unknown: set[bytes] = field(default_factory=set)
    """Keys of pages that another server has stored."""
    pages: dict[bytes, StoredPage] = field(default_factory=dict)
    in_flight: list[Transfer] = field(default_factory=list)
    _finished: list[FinishedTransfer] = field(default_factory=list)
    _lost: set[bytes] = field(default_factory=set)
    """Keys of pages that were lost, by which ``remove`` finds what continued them."""
    all_written: dict[bytes, bytes] = field(default_factory=dict)
    """Tokens of every page that was ever stored, by key."""
    _removed: list[bytes] = field(default_factory=list)
    counts: PageCounts = field(default_factory=PageCounts)
    lent: Counter[bytes] = field(default_factory=Counter)
    """How often each page is lent."""
    n_loans: int = 0
    """Loans, with those that were refused."""
    _mapped: dict[bytes, int] = field(default_factory=dict)
    """The slots of pages that were ever lent."""
    spared: list[bytes] = field(default_factory=list)
    """What was spared last."""
    _n_tickets: int = 0
    _n_removals: int = 0

    @property
    def n_pages(self) -> int:
        return len(self.pages)

    @property
    def n_bytes(self) -> int:
        return len(self.pages) * self.page_bytes

    @property
    def health(self) -> StoreHealth | None:
        return StoreHealth(0, is_away=False) if self.is_shared else None

    def look_up(self, keys: Sequence[bytes], first: int = 0, states: StateKeys | None = None) -> int | None:
        if not self.is_shared:
            return None
        self._n_tickets += 1
        assert first < len(keys), "a lookup of nothing"
        sought = [*keys[first:], *_keys_of_state(keys, len(keys), states)]
        assert self.run(sought) < len(sought), "a lookup of what is known"
        transfer = Transfer(self._n_tickets, list(keys), [], [], None, self._n_removals, True, first, states)
        self.in_flight.append(transfer)
        return self._n_tickets

    def run(self, keys: Sequence[bytes]) -> int:
        return next((n for n, key in enumerate(keys) if key not in self.pages or key in self.unknown), len(keys))

    def has(self, key: bytes) -> bool:
        return self.run((key,)) == 1

    def load(self, keys: Sequence[bytes], tokens: bytes, buffers: Sequence[memoryview]) -> int:
        for buffer in buffers:
            self.copier.slots[slot_of(buffer)] = [POISON] * self.copier.device.page_size
        return self._begin(keys, tokens, buffers, is_load=True)

    def store(self, keys: Sequence[bytes], tokens: bytes, buffers: Sequence[memoryview]) -> int:
        return self._begin(keys, tokens, buffers, is_load=False)

    @property
    def mapped_slots(self) -> MappedSlots:
        raise NotImplementedError("the fake copier has all slots in a dict")

    @property
    def n_lendable(self) -> int:
        return MAX_LENT_PAGES - self.lent.total()

    def lend(self, keys: Sequence[bytes], tokens: bytes, n_usable: int) -> list[int] | None:
        assert keys, "a loan of nothing"
        size = len(tokens) // len(keys)
        self.n_loans += 1
        if self.n_loans % N_LOANS_A_REFUSAL == 0:
            return None
        slots = []
        for index, key in enumerate(keys):
            page = self.pages[key]
            assert page.tokens == tokens[index * size : (index + 1) * size], "a key of other tokens"
            slot = self._mapped.setdefault(key, len(self._mapped) % N_MAPPED_SLOTS)
            self.copier.slots[self.copier.n_slots + slot] = list(page.values)
            slots.append(slot)
        self.lent.update(keys)
        return slots

    def give_back(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        for key, slot in zip(keys, slots, strict=True):
            self.lent[key] -= 1
            assert self.lent[key] >= 0, "a page is given back that is not lent"
            if not self.lent[key]:  # others may write to the slot
                self.copier.slots[self.copier.n_slots + slot] = [POISON] * self.copier.device.page_size

    def spare(self, keys: Sequence[bytes]) -> None:
        self.spared = list(keys)

    def remove(self, key: bytes, leading: Sequence[bytes] = ()) -> Removal:
        known = {*self.pages, *self._lost}
        below = {key[:DIGEST_BYTES]}
        while more := {each[:DIGEST_BYTES] for each in known if each[DIGEST_BYTES:] in below} - below:
            below |= more
        removed = {each for each in self.pages if each[:DIGEST_BYTES] in below}
        for before in reversed(leading):
            if any(each[DIGEST_BYTES:] == before[:DIGEST_BYTES] for each in self.pages.keys() - removed):
                break
            removed |= {before} & self.pages.keys()
        for each in removed:
            del self.pages[each]
        self._removed += removed
        self._n_removals += 1
        self._n_tickets += 1
        self._finished.append(FinishedTransfer(self._n_tickets, len(removed), TRANSFER_S))
        return Removal(self._n_tickets, len(removed))

    def clear(self) -> int:
        self._n_removals += 1
        self._n_tickets += 1
        self._finished.append(FinishedTransfer(self._n_tickets, len(self.pages), TRANSFER_S))
        self._removed += self.pages
        self.pages.clear()
        return self._n_tickets

    def take_removed(self) -> list[bytes]:
        removed, self._removed = self._removed, []
        return removed

    def take_finished(self) -> list[FinishedTransfer]:
        finished, self._finished = self._finished, []
        return finished

    def fileno(self) -> int:
        raise NotImplementedError("tests do not wait for transfers; they finish them")

    def close(self, timeout_s: float) -> None:
        raise NotImplementedError("tests do not close the fake store")

    def finish(self, which: int = 0, *, n_pages: int | None = None) -> None:
        """Finishes a transfer in flight; after its first ``n_pages`` the others fail, and stay in the store."""
        if not self.in_flight:
            return
        transfer = self.in_flight.pop(which % len(self.in_flight))
        n_done, last = 0, len(transfer.keys)
        for index in range(transfer.first, last if n_pages is None else min(transfer.first + n_pages, last)):
            if not self._finish_page(transfer, index):
                break
            n_done += 1
        if transfer.states is not None:
            self._find_state(transfer.keys[: transfer.first + n_done], transfer.first, transfer.states)
        self._finished.append(FinishedTransfer(transfer.ticket, n_done, TRANSFER_S))

    def finish_all(self) -> None:
        while self.in_flight:
            self.finish()

    def make_unknown(self, which: int) -> None:
        """Has a page, and those that the store got after it, be another server's, which this one never saw."""
        if self.is_shared and self.pages:
            keys = list(self.pages)
            self.unknown.update(keys[which % len(keys) :])
            self._removed += keys[which % len(keys) :]

    def lose(self, which: int) -> None:
        """Loses a page."""
        if self.pages:
            key = list(self.pages)[which % len(self.pages)]
            del self.pages[key]
            self._lost.add(key)
            self.counts = self.counts._replace(n_lost=self.counts.n_lost + 1)
            self._removed.append(key)

    def _begin(self, keys: Sequence[bytes], tokens: bytes, buffers: Sequence[memoryview], *, is_load: bool) -> int:
        slots = [slot_of(buffer) for buffer in buffers]
        size = 4 * self.copier.device.page_size
        assert len(keys) == len(slots) > 0, "a transfer of no page, or of unlike numbers"
        assert len(tokens) == size * len(keys), "the tokens are not those of the pages"
        assert len(set(slots)) == len(slots), "a slot twice in one transfer"
        page_tokens = [tokens[first : first + size] for first in range(0, len(tokens), size)]
        sources = None if is_load else [list(self.copier.slots[slot]) for slot in slots]
        self._n_tickets += 1
        transfer = Transfer(self._n_tickets, list(keys), page_tokens, slots, sources, self._n_removals)
        self.in_flight.append(transfer)
        return self._n_tickets

    def _find_state(self, keys: Sequence[bytes], first: int, states: StateKeys) -> None:
        for end in states.ends(len(keys), first):
            of_state = _keys_of_state(keys, end, states)
            if all(key in self.pages for key in of_state):
                self.unknown.difference_update(of_state)
                break

    def _finish_page(self, transfer: Transfer, index: int) -> bool:
        if transfer.is_look_up:
            self.unknown.discard(transfer.keys[index])
            return transfer.keys[index] in self.pages
        key, tokens, slot = transfer.keys[index], transfer.tokens[index], transfer.slots[index]
        if transfer.sources is None:
            if (page := self.pages.get(key)) is None:
                return False
            assert page.tokens == tokens, "a key of other tokens"
            assert POISON in self.copier.slots[slot], f"slot {slot} was used while it was filled"
            self.copier.slots[slot] = list(page.values)
            return True
        if transfer.n_removals != self._n_removals:
            return False
        values = self.copier.slots[slot]
        assert POISON not in values, f"slot {slot} is written, and not filled"
        assert values == transfer.sources[index], f"slot {slot} has changed while it was written"
        self.unknown.discard(key)
        if key not in self.pages:
            self.pages[key] = StoredPage(tokens, list(values))
            self.counts = self.counts._replace(n_written=self.counts.n_written + 1)
        self.all_written.setdefault(key, tokens)
        return True


def _keys_of_state(keys: Sequence[bytes], end: int, states: StateKeys | None) -> list[bytes]:
    """Returns the keys of all pages of the state after ``end`` keys."""
    return [] if states is None else [key for entry in states.parts(end) for key in states.all(keys[entry])]
