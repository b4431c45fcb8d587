"""All that a GPU has for adapters, from settings to slots with matrices."""

from __future__ import annotations

import torch

from radixkv.runtime.device.adapters.base_model import BaseModel
from radixkv.runtime.device.adapters.cuda.blocks import StepAdapters
from radixkv.runtime.device.adapters.cuda.loaded import CudaAdapters
from radixkv.runtime.device.adapters.cuda.memory import AdapterMemory
from radixkv.runtime.device.adapters.cuda.memory_size import SPARE_SLOTS
from radixkv.runtime.device.adapters.cuda.operations import CudaLoraOperations
from radixkv.runtime.device.adapters.sources import open_adapters
from radixkv.runtime.device.adapters.targets import target_shapes
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.ops.cuda.operations import CudaOperations


class OpenedAdapters:
    """The adapters of an engine on one GPU, or of a rank on its own.

    Build the decoder of ``operations``, then call ``load``.

    Args:
        settings: all of the device.
        model: the base model, or a rank's part of it.
        operations: of the device.
        dtype: of activations.
        stream: of the steps.
    """

    def __init__(
        self,
        settings: DeviceSettings,
        model: BaseModel,
        operations: CudaOperations,
        dtype: torch.dtype,
        stream: torch.cuda.Stream,
    ) -> None:
        assert settings.max_loras is not None, "a GPU has a default"
        n_slots = settings.max_loras + SPARE_SLOTS
        self._sources = settings.adapters
        self._model = model
        self._memory = AdapterMemory(n_slots, settings.max_lora_rank, dtype, stream.device)
        self.adapters = CudaAdapters(self._memory, model, max_rank=settings.max_lora_rank, stream=stream)
        """Adapters that rows may ask for."""
        self.step = StepAdapters(
            self.adapters.slots,
            max_tokens=settings.max_num_batched_tokens,
            max_rows=settings.max_num_seqs,
            n_slots=n_slots,
            device=stream.device,
        )
        """Adapters of a step's rows."""
        self.operations = CudaLoraOperations(
            operations, model.config.activation, target_shapes(model.config), self._memory, self.step
        )
        """Operations of the decoder."""

    @property
    def n_products(self) -> int:
        """Products of the decoder that adapters may change."""
        return self._memory.n_products

    def load(self) -> None:
        """Allocates the memory of all slots, and loads the adapters of the settings into host memory.

        Raises:
            CheckpointError: one cannot be read, or has changed.
        """
        self._memory.allocate()
        for adapter in open_adapters(self._sources, self._model):
            self.adapters.prepare(adapter).put()
