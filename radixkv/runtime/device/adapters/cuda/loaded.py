"""The adapters that a GPU has loaded: all in host memory, and some in slots of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixkv.runtime.device.adapters.base_model import BaseModel
from radixkv.runtime.device.adapters.cuda.memory import AdapterMemory, SlotTables
from radixkv.runtime.device.adapters.sources import open_adapter
from radixkv.runtime.device.weights.adapter_matrices import AdapterMatrices


@dataclass(frozen=True)
class PreparedCudaAdapter:
    """A ``ReadAdapter`` whose matrices are in host memory."""

    digest: str
    invocation_tokens: tuple[int, ...] | None
    n_bytes: int
    _matrices: AdapterMatrices
    _adapters: CudaAdapters

    def put(self) -> None:
        """See ``ReadAdapter.put``."""
        self._adapters.keep(self._matrices, self.n_bytes)

    def discard(self) -> None:
        """See ``ReadAdapter.discard``. Its memory is free once nothing refers to it."""


@dataclass
class SlotCopy:
    """An ``AdapterCopy`` into a slot."""

    _matrices: AdapterMatrices
    _slot: int
    _memory: AdapterMemory
    _adapters: CudaAdapters
    _tables: SlotTables | None = None

    def fill(self) -> None:
        """See ``AdapterCopy.fill``."""
        self._tables = self._memory.write(self._slot, self._matrices)

    def put(self) -> None:
        """See ``AdapterCopy.put``."""
        assert self._tables is not None, "fill comes before put"
        self._adapters.publish(self._matrices.digest, self._slot, self._tables)

    def discard(self) -> None:
        """See ``AdapterCopy.discard``."""
        self._adapters.free(self._slot)


class CudaAdapters:
    """``DeviceAdapters`` over the slots of a GPU.

    Args:
        memory: with the products of the decoder, and allocated.
        model: the base model, or a rank's part of it.
        max_rank: most ranks of an adapter.
        stream: of the steps.
    """

    def __init__(
        self,
        memory: AdapterMemory,
        model: BaseModel,
        *,
        max_rank: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.sizes: dict[str, int] = {}
        """See ``DeviceAdapters.sizes``: the bytes of the files, which a rank has whole."""
        self.slots: dict[str, int] = {}
        """The slot of each adapter that rows may ask for, by its digest."""
        self._memory = memory
        self._model = model
        self._max_rank = max_rank
        self._stream = stream
        self._kept: dict[str, AdapterMatrices] = {}
        """By digest."""
        self._free = list(reversed(range(memory.n_slots)))

    def read(self, name: str, path: str) -> PreparedCudaAdapter:
        """See ``DeviceAdapters.read``."""
        return self.prepare(open_adapter(name, path, self._max_rank, self._model))

    def prepare(self, adapter: AdapterMatrices) -> PreparedCudaAdapter:
        """Checks an opened adapter, which stays in host memory. Any thread may call it. O(modules).

        Raises:
            CheckpointError: a module of the adapter is in no product of the decoder.
        """
        self._memory.check(adapter)
        return PreparedCudaAdapter(adapter.digest, adapter.invocation_tokens, adapter.folder.n_bytes, adapter, self)

    def keep(self, adapter: AdapterMatrices, n_bytes: int) -> None:
        """Loads a prepared adapter, until ``remove``."""
        self._kept[adapter.digest] = adapter
        self.sizes[adapter.digest] = n_bytes

    def remove(self, digest: str) -> None:
        """See ``DeviceAdapters.remove``."""
        del self._kept[digest], self.sizes[digest]

    def copy(self, digest: str) -> SlotCopy:
        """See ``DeviceAdapters.copy``."""
        return SlotCopy(self._kept[digest], self._free.pop(), self._memory, self)

    def publish(self, digest: str, slot: int, tables: SlotTables) -> None:
        """Lets rows ask for the adapter that is in a slot, until ``withdraw``."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._memory.publish(slot, tables)
        self.slots[digest] = slot

    def withdraw(self, digest: str) -> None:
        """See ``DeviceAdapters.withdraw``."""
        self.free(self.slots.pop(digest))

    def free(self, slot: int) -> None:
        """Frees a slot, of which no row of a launched step asks."""
        self._free.append(slot)

    def close(self) -> None:
        """Frees the memory of all slots, once no step is launched any more, and nothing is copied."""
        self._memory.release()
