"""What a model's name stands for."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixkv.checkpoints.embedded import embedded_folder
from radixkv.checkpoints.files import is_integer, read_object
from radixkv.checkpoints.generation import read_generation
from radixkv.config import LoadFormat
from radixkv.errors import CheckpointError

if TYPE_CHECKING:
    from radixkv.checkpoints.hub import Part

TINY = "tiny"
"""The name of the embedded model."""

_MAX = 2**63
"""Sizes are below it."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Checkpoint:
    """A model's files, and what every part needs to know of them."""

    name: str
    """What the user asked for."""
    folder: Path
    """Holds ``config.json``; ``*.safetensors``, unless the weights are dummies; ``tokenizer.json``, unless prompts
    are token ids only."""
    config: Mapping[str, Any]
    """The parsed ``config.json``."""
    eos_token_ids: frozenset[int]
    """Tokens that end an answer: those of ``generation_config.json``, else those of ``config.json``."""
    default_sampling: Mapping[str, float | int]
    """What ``generation_config.json`` sets of ``temperature``, ``top_p``, ``top_k``, ``min_p``,
    ``repetition_penalty`` and ``max_new_tokens``, for requests that leave these out."""

    @property
    def has_weights(self) -> bool:
        """Whether all files that should hold weights are in the folder. Raises ``CheckpointError``."""
        index = read_object(self.folder / "model.safetensors.index.json")
        files = {"": "model.safetensors"} if index is None else index.get("weight_map")
        present = os.listdir(self.folder)
        return isinstance(files, dict) and all(file in present for file in files.values())

    @property
    def vocab_size(self) -> int:
        """Token ids are below this. Raises ``CheckpointError``."""
        return self._positive_integer("vocab_size")

    @property
    def max_position_embeddings(self) -> int:
        """The longest context in tokens. Raises ``CheckpointError``.

        Checkpoints whose rotary positions are stretched give the length before: it is multiplied by the factor.
        """
        declared = self._positive_integer("max_position_embeddings")
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling")
        if not isinstance(rope, Mapping):
            return declared
        kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
        original = rope.get("original_max_position_embeddings", declared) if kind == "yarn" else declared
        is_stretched = kind in ("yarn", "linear") and is_integer(original) and original >= 1
        if is_stretched and isinstance(factor, int | float) and 1 <= factor < _MAX / original:
            return max(declared, int(original * factor))
        return declared

    def _positive_integer(self, key: str) -> int:
        value = self.config.get(key)
        if not is_integer(value) or not 1 <= value < _MAX:
            raise CheckpointError(
                f"{self.folder / 'config.json'}: {key} is {value!r}; it must be a positive integer below 2**63"
            )
        return value


def resolve(
    model: str,
    revision: str | None = None,
    *,
    load_format: LoadFormat = "auto",
    cache_folder: Path | None = None,
    hub_endpoint: str | None = None,
) -> Checkpoint:
    """The checkpoint that ``model`` names: a folder, ``tiny`` for the embedded model, or a name on the hub.

    Args:
        model: a folder named ``tiny`` is reached as ``./tiny``.
        revision: a hub repository's branch, tag or commit; None takes ``main``.
        load_format: ``dummy`` needs no weights, and fetches none: all else can be looked at before they are.
        cache_folder: where hub files are kept; None takes the hub's own (``HF_HOME``).
        hub_endpoint: the hub's address; None takes huggingface_hub's (``HF_ENDPOINT``).

    Raises:
        CheckpointError: there is no such checkpoint, or its files are missing or corrupt.

    Cost: some milliseconds; for a hub name a download at first use, and after that one request to the hub.
    """
    parts: tuple[Part, ...] = (
        ("weights", "config", "tokenizer") if load_format == "auto" else ("config", "tokenizer")
    )
    folder = _locate("model", model, revision, parts, cache_folder, hub_endpoint)
    config = read_object(folder / "config.json")
    if config is None:
        raise CheckpointError(f"{folder} has no config.json; give the folder of a Hugging Face checkpoint")
    if load_format == "auto" and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder} has no *.safetensors files; convert the weights, other formats are not read"
        )
    generation = read_generation(folder, config)
    return Checkpoint(model, folder, config, generation.eos_token_ids, generation.default_sampling)


def resolve_tokenizer(
    tokenizer: str,
    revision: str | None = None,
    *,
    cache_folder: Path | None = None,
    hub_endpoint: str | None = None,
) -> Path:
    """The folder with the tokenizer and chat template that ``tokenizer`` names, as ``resolve`` does for models.

    From the hub only these files are fetched: no config and no weights.

    Raises:
        CheckpointError: there is no such folder or repository, or it has no ``tokenizer.json``.
    """
    folder = _locate("tokenizer", tokenizer, revision, ("tokenizer",), cache_folder, hub_endpoint)
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"tokenizer {tokenizer!r}: {folder} has no tokenizer.json; other forms are not read")
    return folder


def _locate(
    what: str,
    name: str,
    revision: str | None,
    parts: tuple[Part, ...],
    cache_folder: Path | None,
    hub_endpoint: str | None,
) -> Path:
    path = Path(os.path.expanduser(name))
    if name == TINY or (name and path.is_dir()):
        if revision is not None:
            raise CheckpointError(
                f"revision {revision!r} is for hub names; {what} {name!r} is not one, leave it out"
            )
        return embedded_folder() if name == TINY else path
    if name and path.exists():
        raise CheckpointError(f"{what} {name!r} is a file; give the folder that holds it")
    if not _HUB_NAME.fullmatch(name):
        raise CheckpointError(
            f"{what} {name!r} is not a folder that exists, nor a hub name like 'org/name'; check the path"
        )
    # Imported when needed: the hub's client takes longer to import than everything else here.
    from radixkv.checkpoints.hub import download

    return download(name, revision, parts=parts, what=what, cache_folder=cache_folder, endpoint=hub_endpoint)
