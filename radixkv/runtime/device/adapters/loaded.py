"""The adapters that a device has loaded, which come and go between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from radixkv.runtime.device.adapters.base_model import BaseModel
from radixkv.runtime.device.adapters.operations import AdapterPairs, LoraOperations
from radixkv.runtime.device.adapters.sources import open_adapter, open_adapters
from radixkv.runtime.device.device_settings import AdapterSource
from radixkv.runtime.device.weights.adapter_matrices import AdapterMatrices


@dataclass(frozen=True)
class PreparedAdapter:
    """A ``ReadAdapter`` whose matrices are the device's."""

    digest: str
    invocation_tokens: tuple[int, ...] | None
    n_bytes: int
    _pairs: list[AdapterPairs]
    _sizes: dict[str, int]

    def put(self) -> None:
        """See ``ReadAdapter.put``."""
        for pairs in self._pairs:
            pairs.of_product[self.digest] = pairs.own
        self._sizes[self.digest] = self.n_bytes

    def discard(self) -> None:
        """See ``ReadAdapter.discard``. Its memory is free once nothing refers to it."""


class NoCopy:
    """The ``AdapterCopy`` of a device that computes with the matrices where they are loaded."""

    def fill(self) -> None:
        """See ``AdapterCopy.fill``."""

    def put(self) -> None:
        """See ``AdapterCopy.put``."""

    def discard(self) -> None:
        """See ``AdapterCopy.discard``."""


class LoadedAdapters:
    """``DeviceAdapters`` over the operations of a decoder.

    Args:
        operations: of the decoder, which is built.
        model: the base model, or a rank's part of it.
        dtype: of the weights.
        max_rank: most ranks of an adapter.
    """

    def __init__(self, operations: LoraOperations, model: BaseModel, dtype: torch.dtype, *, max_rank: int) -> None:
        self.sizes: dict[str, int] = {}
        """See ``DeviceAdapters.sizes``."""
        self._operations = operations
        self._model = model
        self._dtype = dtype
        self._max_rank = max_rank

    def load(self, sources: Sequence[AdapterSource]) -> None:
        """Loads the adapters of the start.

        Raises:
            CheckpointError: one cannot be read, or has changed.
        """
        for adapter in open_adapters(sources, self._model):
            self.prepare(adapter).put()

    def read(self, name: str, path: str) -> PreparedAdapter:
        """See ``DeviceAdapters.read``."""
        return self.prepare(open_adapter(name, path, self._max_rank, self._model))

    def prepare(self, adapter: AdapterMatrices) -> PreparedAdapter:
        """Makes the matrices of an opened adapter the device's. Any thread may call it.

        Raises:
            CheckpointError: a module of the adapter is in no product of the decoder.
        """
        n_bytes = adapter.n_values * self._dtype.itemsize
        return PreparedAdapter(
            adapter.digest, adapter.invocation_tokens, n_bytes, self._operations.pairs(adapter), self.sizes
        )

    def remove(self, digest: str) -> None:
        """See ``DeviceAdapters.remove``."""
        self._operations.remove(digest)
        del self.sizes[digest]

    def copy(self, digest: str) -> NoCopy:
        """See ``DeviceAdapters.copy``."""
        return NoCopy()

    def withdraw(self, digest: str) -> None:
        """See ``DeviceAdapters.withdraw``."""
