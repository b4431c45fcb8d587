"""What a model's name stands for."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from radixkv.errors import CheckpointError

TINY = "tiny"
"""The name of the embedded model."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Checkpoint:
    """A model's files, and what every part needs to know of them."""

    name: str
    """What the user asked for."""
    folder: Path
    """Holds ``config.json``, ``*.safetensors`` and, unless prompts are token ids only, ``tokenizer.json``."""
    config: Mapping[str, Any]
    """The parsed ``config.json``."""
    eos_token_ids: frozenset[int]
    """Tokens that end an answer: those of ``generation_config.json``, else those of ``config.json``."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this. Raises ``CheckpointError``."""
        return self._positive_integer("vocab_size")

    @property
    def max_position_embeddings(self) -> int:
        """The longest context in tokens. Raises ``CheckpointError``."""
        return self._positive_integer("max_position_embeddings")

    def _positive_integer(self, key: str) -> int:
        value = self.config.get(key)
        if not _is_integer(value) or value < 1:
            raise CheckpointError(
                f"{self.folder / 'config.json'}: {key} is {value!r}; it must be a positive integer"
            )
        return value


def resolve(
    model: str,
    revision: str | None = None,
    *,
    cache_folder: Path | None = None,
    hub_endpoint: str | None = None,
) -> Checkpoint:
    """The checkpoint that ``model`` names: a folder, ``tiny`` for the embedded model, or a name on the hub.

    Args:
        model: a folder named ``tiny`` is reached as ``./tiny``.
        revision: a hub repository's branch, tag or commit; None takes ``main``.
        cache_folder: where ``tiny`` is built and hub files are kept. None: ``radixkv`` in the user's cache
            folder (``XDG_CACHE_HOME``, else ``~/.cache``), and the hub's own cache.
        hub_endpoint: the hub's address; None takes huggingface_hub's (``HF_ENDPOINT``).

    Raises:
        CheckpointError: there is no such checkpoint, or its files are missing or corrupt.

    Cost: a download or a build of about two seconds at first use; after that some milliseconds, and for a hub
    name one request to the hub.
    """
    folder = _locate(model, revision, cache_folder, hub_endpoint)
    config = _read_json(folder / "config.json")
    if config is None:
        raise CheckpointError(f"{folder} has no config.json; give the folder of a Hugging Face checkpoint")
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder} has no *.safetensors files; convert the weights, other formats are not read"
        )
    return Checkpoint(model, folder, config, _eos_token_ids(folder, config))


def _locate(model: str, revision: str | None, cache_folder: Path | None, hub_endpoint: str | None) -> Path:
    path = Path(os.path.expanduser(model))
    if model != TINY and not (model and path.is_dir()):
        if model and path.exists():
            raise CheckpointError(f"model {model!r} is a file; give the folder that holds config.json")
        if not _HUB_NAME.fullmatch(model):
            raise CheckpointError(
                f"model {model!r} is not a folder that exists, nor a hub name like 'org/name'; check the path"
            )
        # Imported when needed: the hub's client takes longer to import than everything else here.
        from radixkv.checkpoints.hub import download

        return download(model, revision, cache_folder and cache_folder / "hub", hub_endpoint)
    if revision is not None:
        raise CheckpointError(f"revision {revision!r} is for hub names; model {model!r} is not one, leave it out")
    if model != TINY:
        return path
    # Imported when needed: it brings numpy and the build.
    from radixkv.checkpoints.tiny import embedded_folder

    return embedded_folder(cache_folder or _user_cache_folder())


def _user_cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "radixkv"


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; fetch the checkpoint again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not an object; fetch the checkpoint again")
    return content


def _eos_token_ids(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    generation_config = _read_json(folder / "generation_config.json") or {}
    for file, content in (("generation_config.json", generation_config), ("config.json", config)):
        value = content.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(_is_integer(token) and token >= 0 for token in ids):
            raise CheckpointError(
                f"{folder / file}: eos_token_id is {value!r}; it must be a token id or a list of them"
            )
        return frozenset(ids)
    return frozenset()


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
