"""Host slots of the CPU device: memory for pages and window pages beside its KV pool."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from radixkv.runtime.device.memory.copy_threads import count_slots
from radixkv.runtime.device.memory.cpu.kv_pool import KVPool
from radixkv.runtime.device.memory.cpu.slab_pool import SlabPool
from radixkv.runtime.device.memory.pinned_memory import map_shared
from radixkv.runtime.device.memory_check import require_host_memory
from radixkv.runtime.step.page_copier import MappedSlots, SlotPart


class CpuHostSlots:
    """``copy_threads.HostSlots`` over the pages of a pool; of one in slabs, the pages of layers without windows.

    Slots are page-first, [slots, parts, 2, layers, kv_heads, page_size, head_dim] with K before V, so that each is
    contiguous; a part is of a rank, and of the layers that have heads of one shape. The memory is reserved at once
    and taken by each slot as it is first used.

    Args:
        pool: the pool to copy from and to.
        n_bytes: size of the host memory; the slots are as many as fit.
        part: of each slot; see ``Executor.open_copier``.
        n_state_bytes: leading bytes of the memory that states of recurrent layers have.

    Raises:
        ConfigError: not even one slot fits into ``n_bytes``, or ``n_bytes`` do not fit into memory.
    """

    def __init__(
        self, pool: KVPool | SlabPool, n_bytes: int, part: SlotPart | None = None, *, n_state_bytes: int = 0
    ) -> None:
        self._part_bytes = part_bytes = sum(2 * one.k[:, 0].nbytes for one in pool.parts)
        self.page_bytes = part_bytes if part is None else part.n_parts * part_bytes
        self.n_slots = count_slots(n_bytes - n_state_bytes, self.page_bytes)
        require_host_memory(n_bytes)
        n_mapped = n_state_bytes + self.n_slots * self.page_bytes
        if part is None:
            mapped = mmap.mmap(-1, n_mapped, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            mapped = map_shared(part.memory, n_mapped)
        self.state_memory = memoryview(mapped)[:n_state_bytes]
        """The memory that states have, zero at first."""
        memory = torch.frombuffer(mapped, dtype=torch.uint8, offset=n_state_bytes)
        self._memory = memory.view(self.n_slots, self.page_bytes)
        self._part_index = 0 if part is None else part.index
        first = self._part_index * part_bytes
        self._pool = pool
        self._slots = self._parts(self._memory[:, first : first + part_bytes])
        self.n_mapped_slots = 0
        """See ``PageCopier.n_mapped_slots``."""
        self._mapped: list[Tensor] = []
        """Those of ``map_slots``, as ``_slots``."""
        self.stores = part is None or part.stores
        """Whether pages are stored, see ``SlotPart``."""

    @property
    def n_usable(self) -> int:
        """All slots."""
        return self.n_slots

    @property
    def is_growing(self) -> bool:
        """False."""
        return False

    def slabs(self, pages_per_slab: int) -> Tensor:
        """Returns this rank's part of each slab of ``pages_per_slab`` slots, [slabs, bytes]. O(1)."""
        n_slabs = self.n_slots // pages_per_slab
        memory = self._memory[: n_slabs * pages_per_slab].view(n_slabs, pages_per_slab * self.page_bytes)
        n_bytes = pages_per_slab * self._part_bytes
        first = self._part_index * n_bytes
        return memory[:, first : first + n_bytes]

    def buffer(self, slot: int) -> memoryview:
        """Returns the memory of a slot. O(1)."""
        return self._memory[slot].numpy().data.cast("B")

    def map_slots(self, mapped: MappedSlots) -> None:
        """See ``HostMemoryCopier.map_slots``. O(1)."""
        assert self.page_bytes == self._part_bytes, "a rank has a part of each page, and maps none"
        memory = torch.frombuffer(mapped.memory, dtype=torch.uint8)
        sizes, strides = (mapped.n_slots, self.page_bytes), (mapped.slot_bytes, 1)
        self._mapped = self._parts(memory.as_strided(sizes, strides, mapped.first))
        self.n_mapped_slots = mapped.n_slots

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copies slots to pages."""
        for slot, page in zip(slots, pages, strict=True):
            parts, index = (self._slots, slot) if slot < self.n_slots else (self._mapped, slot - self.n_slots)
            for one, part in zip(parts, self._pool.parts, strict=True):
                part.k[:, page].copy_(one[index, 0])
                part.v[:, page].copy_(one[index, 1])

    def store(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copies pages to slots."""
        if not self.stores:
            return
        for page, slot in zip(pages, slots, strict=True):
            for slot_part, part in zip(self._slots, self._pool.parts, strict=True):
                slot_part[slot, 0].copy_(part.k[:, page])
                slot_part[slot, 1].copy_(part.v[:, page])

    def close(self) -> None:
        """Frees the memory with the last reference to this object."""
        self._mapped = []

    def _parts(self, memory: Tensor) -> list[Tensor]:
        """Views slots, [slots, bytes of all parts], as [slots, 2, layers, kv_heads, page_size, head_dim] each."""
        sizes = [2 * one.k[:, 0].nbytes for one in self._pool.parts]
        return [
            one.view(part.k.dtype).unflatten(1, (2, *part.k[:, 0].shape))
            for one, part in zip(memory.split(sizes, 1), self._pool.parts, strict=True)
        ]


class CpuHostWindows:
    """``copy_threads.StateCopies`` of the window pages of a ``SlabPool``.

    A window page takes the place of the host slots of a slab. It has the ranks' parts side by side, each at the
    beginning of as many bytes as the rank's parts of these slots take.

    Args:
        pool: the pool to copy from and to.
        slots: its host slots.
        pages_per_slab: host slots that a window page takes.
    """

    def __init__(self, pool: SlabPool, slots: CpuHostSlots, pages_per_slab: int) -> None:
        sizes, n_bytes = pool.windows.k[:, 0].shape, 2 * pool.windows.k[:, 0].nbytes
        memory = slots.slabs(pages_per_slab)[:, :n_bytes]
        self._slots = memory.view(pool.k.dtype).unflatten(1, (2, *sizes))
        self._stores = slots.stores
        self._pool = pool

    def load(self, states: Sequence[tuple[int, int]]) -> None:
        """Copies window pages from the host (source, destination)."""
        for slab, page in states:
            self._pool.windows.k[:, page].copy_(self._slots[slab, 0])
            self._pool.windows.v[:, page].copy_(self._slots[slab, 1])

    def store(self, states: Sequence[tuple[int, int]]) -> None:
        """Copies window pages to the host (destination, source)."""
        if not self._stores:
            return
        for slab, page in states:
            self._slots[slab, 0].copy_(self._pool.windows.k[:, page])
            self._slots[slab, 1].copy_(self._pool.windows.v[:, page])
