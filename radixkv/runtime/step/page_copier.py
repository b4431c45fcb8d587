"""Contract between cache and device for the host tier: copies of pages between the KV pool and host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True)
class SlotPart:
    """The part of every host slot that one of several ranks copies: a slot has the ranks' parts side by side."""

    memory: int
    """Descriptor of the memory that the ranks share."""
    index: int
    n_parts: int
    stores: bool
    """Whether the rank stores pages; of ranks that have the same part only the first does."""
    rank: int
    """Number of the rank, which has a part of its own of each state of recurrent layers."""
    n_ranks: int


class MappedSlots(NamedTuple):
    """Slots of a page each in memory that another object has mapped, and that is never moved."""

    memory: memoryview
    """All of the mapping."""
    first: int
    """Where the first slot's page is in it, a multiple of the machine's page size."""
    slot_bytes: int
    """From one slot's page to the next one's, a multiple of the machine's page size."""
    n_slots: int


class FinishedCopy(NamedTuple):
    """The outcome of one ``load`` or ``store``."""

    ticket: int
    """What ``load`` or ``store`` returned."""
    seconds: float
    """How long the copy itself took, without its time in the queue."""
    error: str | None
    """Why the copy failed, so that its destination has undefined contents; None if it succeeded."""


class PageCopier(Protocol):
    """Copies pages between the device's KV pool and slots in host memory, beside the steps.

    A host slot holds one page: K and V of all layers that have pages, contiguous. Loads and stores run in the
    background, each kind in the order of its calls. The copier orders nothing against the steps: the caller must
    copy only pages whose steps' results it has taken, and must leave a copy's pages and slots alone until the copy
    has finished.

    States are copied with pages, as pairs. For recurrent layers a pair is a host slot and the tree's slot on the
    device: their states have host slots of their own. With window pages it is a slab of host slots and a window
    page: window page ``w`` takes the place of the host slots that ``WindowPages.pages_of`` names.
    """

    @property
    def n_slots(self) -> int:
        """Host slots in all."""

    @property
    def n_state_slots(self) -> int:
        """Host slots for states of recurrent layers, usable once ``take_new_slots`` has returned a slot; 0 without
        such layers."""

    @property
    def n_mapped_slots(self) -> int:
        """Slots of another object's memory that ``load`` takes by now, from number ``n_slots`` on; see
        ``HostMemoryCopier.map_slots``."""

    @property
    def page_bytes(self) -> int:
        """Size of a page and of a slot in bytes."""

    @property
    def is_growing(self) -> bool:
        """Whether slots may become usable later. It ends before all are where their memory cannot be had."""

    def take_new_slots(self) -> range:
        """Returns the slots that have become usable since the last call; their memory is ready. O(1)."""

    def load(self, slots: Sequence[int], pages: Sequence[int], states: Sequence[tuple[int, int]] = ()) -> int:
        """Starts to copy each slot to the page at the same index, and states; returns a ticket. O(pages)."""

    def store(self, pages: Sequence[int], slots: Sequence[int], states: Sequence[tuple[int, int]] = ()) -> int:
        """Starts to copy each page to the slot at the same index, and states; returns a ticket. O(pages)."""

    def take_finished(self) -> list[FinishedCopy]:
        """Returns the copies that have finished since the last call, in any order. O(1) if there is none."""

    def fileno(self) -> int:
        """A descriptor that is readable while ``take_finished`` has something to return."""

    def close(self) -> None:
        """Waits for the copies that have begun, drops the others, and frees the host memory."""


class HostMemoryCopier(PageCopier, Protocol):
    """A ``PageCopier`` whose slots are memory of this process, which may be read and written between copies."""

    def buffer(self, slot: int) -> memoryview:
        """Returns the memory of a usable slot, writable, ``page_bytes`` long. O(1)."""

    def state_buffers(self, slot: int) -> list[memoryview]:
        """Returns the memory of a host slot for a state, in writable parts of ``page_bytes`` each. O(parts)."""

    def map_slots(self, mapped: MappedSlots) -> None:
        """Lets ``load`` take the slots of a mapping, too, as ``n_mapped_slots`` says. Called once.

        None of them is ever taken where ranks copy a part of each page.

        The mapping's owner must leave a slot alone until its copy has finished. The copier keeps the mapping until
        it is closed.
        """
