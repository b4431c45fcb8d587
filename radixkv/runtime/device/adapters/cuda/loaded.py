"""The adapters that a GPU has, each in a slot of its memory."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

import torch

from radixkv.errors import CheckpointError, shortened
from radixkv.runtime.device.adapters.base_model import BaseModel
from radixkv.runtime.device.adapters.cuda.memory import AdapterMemory, SlotTables
from radixkv.runtime.device.adapters.sources import open_adapter
from radixkv.runtime.device.weights.adapter_matrices import AdapterMatrices


@dataclass
class FilledSlot:
    """A slot with the matrices of an adapter."""

    slot: int
    tables: SlotTables
    n_holders: int
    """One for each ``PreparedCudaAdapter`` that was neither put nor discarded, and one if rows may ask for it."""


@dataclass(frozen=True)
class PreparedCudaAdapter:
    """A ``ReadAdapter`` whose matrices are in a slot, which is not freed before it is put or discarded."""

    digest: str
    invocation_tokens: tuple[int, ...] | None
    n_bytes: int
    _adapters: CudaAdapters

    def put(self) -> None:
        """See ``ReadAdapter.put``."""
        self._adapters.publish(self.digest, self.n_bytes)

    def discard(self) -> None:
        """See ``ReadAdapter.discard``."""
        self._adapters.release(self.digest)


class CudaAdapters:
    """``DeviceAdapters`` over the slots of a GPU. A digest has one slot, however often it is read.

    Args:
        memory: with the products of the decoder, and allocated.
        model: the base model, or a rank's part of it.
        dtype: of the matrices.
        max_rank: most ranks of an adapter.
        stream: of the steps.
    """

    def __init__(
        self,
        memory: AdapterMemory,
        model: BaseModel,
        dtype: torch.dtype,
        *,
        max_rank: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.sizes: dict[str, int] = {}
        """See ``DeviceAdapters.sizes``."""
        self.slots: dict[str, int] = {}
        """The slot of each adapter that rows may ask for, by its digest."""
        self._memory = memory
        self._model = model
        self._dtype = dtype
        self._max_rank = max_rank
        self._stream = stream
        self._free = list(reversed(range(memory.n_slots)))
        self._filled: dict[str, FilledSlot] = {}
        """By digest."""
        self._lock = Lock()
        """Held for microseconds, to look at ``_free`` and ``_filled`` or to change them."""
        self._one_reader = Lock()
        """Held while a thread prepares an adapter, so that another one finds it if it is the same."""

    def read(self, name: str, path: str) -> PreparedCudaAdapter:
        """See ``DeviceAdapters.read``."""
        folder = open_adapter(name, path, self._max_rank, self._model)
        try:
            return self.prepare(folder)
        except CheckpointError as error:
            raise CheckpointError(f"adapter {shortened(name)}: {error}") from None

    def prepare(self, folder: AdapterMatrices) -> PreparedCudaAdapter:
        """Copies the matrices of an opened adapter into a free slot, unless a slot has them.

        Any thread may call it, beside steps. It waits for other threads that do.

        Raises:
            CheckpointError: no slot is free, or a module of the adapter is in no product of the decoder.
        """
        self._memory.check(folder)
        with self._one_reader:
            if not self._hold(folder.digest):
                self._fill(folder)
        n_bytes = folder.n_values * self._dtype.itemsize
        return PreparedCudaAdapter(folder.digest, folder.invocation_tokens, n_bytes, self)

    def publish(self, digest: str, n_bytes: int) -> None:
        """Lets rows ask for a prepared adapter, until ``remove``."""
        filled = self._filled[digest]
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._memory.publish(filled.slot, filled.tables)
        self.slots[digest] = filled.slot
        self.sizes[digest] = n_bytes

    def remove(self, digest: str) -> None:
        """See ``DeviceAdapters.remove``."""
        del self.slots[digest], self.sizes[digest]
        self.release(digest)

    def close(self) -> None:
        """Frees the memory of all slots, once no step is launched any more, and nothing is read."""
        self._memory.release()

    def release(self, digest: str) -> None:
        """Frees the slot of an adapter, of which no row of a launched step asks, unless it is prepared again."""
        with self._lock:
            filled = self._filled[digest]
            filled.n_holders -= 1
            if not filled.n_holders:
                del self._filled[digest]
                self._free.append(filled.slot)

    def _hold(self, digest: str) -> bool:
        """Keeps a slot that has an adapter; returns whether there is one."""
        with self._lock:
            filled = self._filled.get(digest)
            if filled is not None:
                filled.n_holders += 1
        return filled is not None

    def _fill(self, folder: AdapterMatrices) -> None:
        """Copies the matrices of an adapter into a free slot, which has one holder then."""
        with self._lock:
            if not self._free:
                raise CheckpointError(
                    f"the GPU has room for {self._memory.n_slots} adapters, one more than max_loras, and all is "
                    "taken, perhaps by unloaded ones whose requests still run; unload one, wait for requests, or "
                    "set max_loras higher"
                )
            slot = self._free.pop()
        try:
            tables = self._memory.write(slot, folder)
        except BaseException:
            with self._lock:
                self._free.append(slot)
            raise
        with self._lock:
            self._filled[folder.digest] = FilledSlot(slot, tables, 1)
