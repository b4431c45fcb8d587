"""The model that adapters change, and the part of it that a rank has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from radixkv.checkpoints import Checkpoint
from radixkv.checkpoints.adapters import AdapterFolder
from radixkv.runtime.device.adapters.targets import fitted, target_shapes
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.weights.adapter_matrices import AdapterMatrices
from radixkv.runtime.device.weights.shards import Cut, Shard


@dataclass(frozen=True)
class BaseModel:
    """A model whose matrices adapters change, and where a rank's parts of these are."""

    config: DecoderConfig
    """Configuration of the whole model."""
    cuts: Mapping[str, Cut]
    """See ``AdapterMatrices.cuts``."""

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, shard: Shard | None = None) -> Self:
        """Returns the model of a checkpoint with a rank's part of it.

        Args:
            checkpoint: of the whole model.
            shard: the rank's; None: all of the model.
        """
        return cls.of(DecoderConfig.parse(checkpoint.config, checkpoint.folder / "config.json"), shard)

    @classmethod
    def of(cls, config: DecoderConfig, shard: Shard | None = None) -> Self:
        """Returns a model with a rank's part of it.

        Args:
            config: of the whole model.
            shard: the rank's; None: all of the model.
        """
        if shard is None:
            return cls(config, {})
        cuts = shard.cuts(config)
        names = {module: f"{module}.weight" for module in target_shapes(config)}
        return cls(config, {module: cuts[name] for module, name in names.items() if name in cuts})

    def matrices(self, folder: AdapterFolder) -> AdapterMatrices:
        """Returns the rank's part of an adapter, after checking that it fits the whole model.

        Raises:
            CheckpointError: see ``targets.fitted``.
        """
        return AdapterMatrices(fitted(folder, self.config), self.cuts)
