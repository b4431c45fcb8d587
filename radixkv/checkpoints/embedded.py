"""The embedded model, which is shipped with the package."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from radixkv.checkpoints.files import read_header
from radixkv.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", _INDEX)


def embedded_folder() -> Path:
    """Returns the folder of the embedded model, ``tiny`` beside this module.

    Raises:
        CheckpointError: the package is inside an archive, or its installation is incomplete.

    Cost: some 3 ms.
    """
    folder = resources.files(__package__).joinpath("tiny")
    if not isinstance(folder, Path):
        raise CheckpointError("radixkv runs from an archive, in which no model can be read; install it unpacked")
    check_complete(folder)
    return folder


def check_complete(folder: Path) -> None:
    """Detects an incomplete installation, missing package data and damaged files.

    Reads only the headers and sizes of the weight files, not the weights.

    Raises:
        CheckpointError: a file is missing or malformed, or the weight files are too small.
    """
    try:
        objects = {name: _parse_object(folder / name, (folder / name).read_bytes()) for name in _FILES}
        shards = sorted(set(objects[_INDEX]["weight_map"].values()))
        min_bytes = int(objects[_INDEX]["metadata"]["total_size"])
        n_bytes = sum((folder / name).stat().st_size for name in shards)
    except OSError as error:
        raise _damaged(folder, str(error)) from error
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise _damaged(folder, f"{_INDEX} is not a valid index: {error!r}") from error
    if n_bytes < min_bytes:
        raise _damaged(folder, f"{', '.join(shards)} have {n_bytes} bytes, but the weights take {min_bytes}")
    for name in shards:
        _parse_object(folder / name, read_header(folder / name))


def _parse_object(path: Path, content: bytes) -> dict[str, Any]:
    """Parses the content of a file, or its header, as a JSON object."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _damaged(path.parent, f"{path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise _damaged(path.parent, f"{path.name} contains a JSON {type(value).__name__}, not an object")
    return value


def _damaged(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"the embedded model in {folder} is damaged: {reason}; reinstall radixkv")
