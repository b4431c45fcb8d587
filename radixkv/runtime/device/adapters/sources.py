"""Adapters in folders: those of the start are found and checked before weights are read, and opened with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from radixkv.checkpoints.adapters import AdapterFolder
from radixkv.errors import CheckpointError, ConfigError, shortened
from radixkv.runtime.device.adapters.base_model import BaseModel
from radixkv.runtime.device.device_settings import AdapterSource
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.weights.adapter_matrices import AdapterMatrices
from radixkv.runtime.device.weights.shards import Shard
from radixkv.settings.config import AdapterConfig, Task

DEFAULT_MAX_LORAS = 8
"""Adapters that a GPU has room for where no setting says how many."""


def find_adapters(
    config: AdapterConfig, model: DecoderConfig, *, n_ranks: int, task: Task
) -> tuple[AdapterSource, ...]:
    """Opens and checks the adapters that the settings name. Reads their files, to digest them.

    Args:
        config: names and folders of the adapters, with their limits.
        model: the base model.
        n_ranks: ranks that compute the model together.
        task: what the engine does with prompts.

    Raises:
        CheckpointError: an adapter cannot be read, or not be served.
        ConfigError: this engine has no adapters in this release, or ranks cannot divide the model.
    """
    if not config.has_adapters:
        return ()
    setting = "lora_modules" if config.lora_modules else "enable_lora"
    if task != "generate":
        raise ConfigError(f"{setting}: adapters only generate in this release; leave task {task} out")
    base = BaseModel.of(model, None if n_ranks == 1 else Shard(0, n_ranks))
    sources: list[AdapterSource] = []
    for module in config.lora_modules:
        adapter = open_adapter(module.name, module.path, config.max_lora_rank, base)
        sources.append(
            AdapterSource(
                module.name,
                module.path,
                adapter.digest,
                config.max_lora_rank,
                adapter.n_values,
                adapter.invocation_tokens,
            )
        )
    return tuple(sources)


def open_adapters(sources: Sequence[AdapterSource], model: BaseModel) -> list[AdapterMatrices]:
    """Opens adapters that were found before; of several with the same contents one.

    Args:
        sources: as ``find_adapters`` returned them.
        model: the base model, or a rank's part of it.

    Raises:
        CheckpointError: one cannot be read, or has changed.
    """
    adapters: dict[str, AdapterMatrices] = {}
    for source in sources:
        if source.digest not in adapters:
            adapter = open_adapter(source.name, source.path, source.max_rank, model)
            if adapter.digest != source.digest:
                raise CheckpointError(
                    f"adapter {source.name!r}: the files in {source.path} have changed while the engine started; "
                    "start it again"
                )
            adapters[source.digest] = adapter
    return list(adapters.values())


def open_adapter(name: str, path: str, max_rank: int, model: BaseModel) -> AdapterMatrices:
    """Opens a folder and checks that the adapter fits the model.

    Args:
        name: by which requests ask for it.
        path: of the folder.
        max_rank: most ranks that it may have.
        model: the base model, or a rank's part of it.

    Raises:
        CheckpointError: the adapter cannot be read, or not be served.
    """
    try:
        folder = AdapterFolder.open(Path(path).expanduser(), max_rank=max_rank)
        _check_invocation(folder, model.config.vocab_size)
        return model.matrices(folder)
    except CheckpointError as error:
        raise CheckpointError(f"adapter {shortened(name)}: {error}") from None


def _check_invocation(folder: AdapterFolder, vocab_size: int) -> None:
    unknown = [token for token in folder.invocation_tokens or () if token >= vocab_size]
    if unknown:
        raise CheckpointError(
            f"{folder.path}: alora_invocation_tokens has the id {unknown[0]}, and the model's vocabulary only ids "
            f"below {vocab_size}, so no prompt could activate it; use an adapter of this model"
        )
