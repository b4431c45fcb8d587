"""Host slots of the CPU device: memory for pages beside its KV pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radixkv.runtime.device.memory.copy_threads import count_slots
from radixkv.runtime.device.memory.cpu.kv_pool import KVPool
from radixkv.runtime.device.memory.pinned_memory import map_shared
from radixkv.runtime.device.memory_check import require_host_memory
from radixkv.runtime.step.page_copier import SlotPart


class CpuHostSlots:
    """``copy_threads.HostSlots`` over a ``KVPool``.

    Slots are page-first, [slots, parts, 2, layers, kv_heads, page_size, head_dim] with K before V, so that each is
    contiguous. The memory is reserved at once and taken by each slot as it is first used.

    Args:
        pool: the pool to copy from and to.
        n_bytes: size of the host memory; the slots are as many as fit.
        part: of each slot; see ``Executor.open_copier``.

    Raises:
        ConfigError: not even one slot fits into ``n_bytes``, or ``n_bytes`` do not fit into memory.
    """

    def __init__(self, pool: KVPool, n_bytes: int, part: SlotPart | None = None) -> None:
        n_layers, _, n_kv_heads, page_size, head_dim = pool.k.shape
        shape = (2, n_layers, n_kv_heads, page_size, head_dim)
        part_bytes = torch.Size(shape).numel() * pool.k.dtype.itemsize
        self.page_bytes = part_bytes if part is None else part.n_parts * part_bytes
        self.n_slots = count_slots(n_bytes, self.page_bytes)
        require_host_memory(n_bytes)
        if part is None:
            memory = torch.empty(self.n_slots * self.page_bytes, dtype=torch.uint8)
        else:
            memory = torch.frombuffer(map_shared(part.memory, self.n_slots * self.page_bytes), dtype=torch.uint8)
        self._memory = memory.view(self.n_slots, self.page_bytes)
        first = 0 if part is None else part.index * part_bytes
        self._slots = self._memory[:, first : first + part_bytes].view(pool.k.dtype).unflatten(1, shape)
        """[slots, 2, layers, kv_heads, page_size, head_dim]."""
        self._stores = part is None or part.stores
        self._pool = pool

    @property
    def n_usable(self) -> int:
        """All slots."""
        return self.n_slots

    def buffer(self, slot: int) -> memoryview:
        """Returns the memory of a slot. O(1)."""
        return self._memory[slot].numpy().data.cast("B")

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copies slots to pages."""
        for slot, page in zip(slots, pages, strict=True):
            self._pool.k[:, page].copy_(self._slots[slot, 0])
            self._pool.v[:, page].copy_(self._slots[slot, 1])

    def store(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copies pages to slots."""
        if not self._stores:
            return
        for page, slot in zip(pages, slots, strict=True):
            self._slots[slot, 0].copy_(self._pool.k[:, page])
            self._slots[slot, 1].copy_(self._pool.v[:, page])

    def close(self) -> None:
        """Frees the memory with the last reference to this object."""
