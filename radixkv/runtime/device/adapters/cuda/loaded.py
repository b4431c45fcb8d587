"""The adapters that a GPU has, each in a slot of its memory."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

import torch

from radixkv.checkpoints.adapters import AdapterFolder
from radixkv.errors import CheckpointError, shortened
from radixkv.runtime.device.adapters.cuda.memory import AdapterMemory, SlotTables
from radixkv.runtime.device.adapters.sources import count_values, open_adapter
from radixkv.runtime.device.model_config.config import DecoderConfig


@dataclass(frozen=True)
class PreparedCudaAdapter:
    """A ``ReadAdapter`` whose matrices are in a slot."""

    digest: str
    invocation_tokens: tuple[int, ...] | None
    n_bytes: int
    _adapters: CudaAdapters
    _slot: int
    _tables: SlotTables

    def put(self) -> None:
        """See ``ReadAdapter.put``."""
        self._adapters.publish(self.digest, self._slot, self._tables, self.n_bytes)

    def discard(self) -> None:
        """See ``ReadAdapter.discard``."""
        self._adapters.free(self._slot)


class CudaAdapters:
    """``DeviceAdapters`` over the slots of a GPU.

    Args:
        memory: with the products of the decoder, and allocated.
        model: the base model.
        dtype: of the matrices.
        max_rank: most ranks of an adapter.
        stream: of the steps.
    """

    def __init__(
        self,
        memory: AdapterMemory,
        model: DecoderConfig,
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
        self._lock = Lock()

    def read(self, name: str, path: str) -> PreparedCudaAdapter:
        """See ``DeviceAdapters.read``."""
        folder = open_adapter(name, path, self._max_rank, self._model)
        try:
            return self.prepare(folder)
        except CheckpointError as error:
            raise CheckpointError(f"adapter {shortened(name)}: {error}") from None

    def prepare(self, folder: AdapterFolder) -> PreparedCudaAdapter:
        """Copies the matrices of an opened adapter into a free slot. Any thread may call it, beside steps.

        Raises:
            CheckpointError: no slot is free, or a module of the adapter is in no product of the decoder.
        """
        self._memory.check(folder)
        slot = self._take_slot()
        try:
            tables = self._memory.write(slot, folder)
        except BaseException:
            self.free(slot)
            raise
        n_bytes = count_values(folder) * self._dtype.itemsize
        return PreparedCudaAdapter(folder.digest, folder.invocation_tokens, n_bytes, self, slot, tables)

    def publish(self, digest: str, slot: int, tables: SlotTables, n_bytes: int) -> None:
        """Lets rows ask for the adapter in a slot."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._memory.publish(slot, tables)
        self.slots[digest] = slot
        self.sizes[digest] = n_bytes

    def remove(self, digest: str) -> None:
        """See ``DeviceAdapters.remove``."""
        self.free(self.slots.pop(digest))
        del self.sizes[digest]

    def close(self) -> None:
        """Frees the memory of all slots, once no step is launched any more, and nothing is read."""
        self._memory.release()

    def free(self, slot: int) -> None:
        """Frees a slot, which no row of a launched step uses."""
        with self._lock:
            self._free.append(slot)

    def _take_slot(self) -> int:
        with self._lock:
            if not self._free:
                raise CheckpointError(
                    f"the GPU has room for {self._memory.n_slots} adapters, one more than max_loras, and all is "
                    "taken, perhaps by unloaded ones whose requests still run; unload one, wait for requests, or "
                    "set max_loras higher"
                )
            return self._free.pop()
