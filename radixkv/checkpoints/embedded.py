"""The model that comes with the package."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from radixkv.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", _INDEX)


def embedded_folder() -> Path:
    """The folder of the embedded model, which lies beside this module.

    Raises:
        CheckpointError: the package lies in an archive, or was not installed whole.

    Cost: some 3 ms.
    """
    folder = resources.files(__package__).joinpath("tiny")
    if not isinstance(folder, Path):
        raise CheckpointError("radixkv runs out of an archive, where no model can be read; install it unpacked")
    check_whole(folder)
    return folder


def check_whole(folder: Path) -> None:
    """Refuses what an installation leaves that stopped halfway or forgot data, and damage outside the weights.

    Of the weights it reads their heads, and looks at their size.

    Raises:
        CheckpointError: a file is missing or is not what it should be, or there is less than all weights.
    """
    try:
        objects = {name: _object(folder / name, (folder / name).read_bytes()) for name in _FILES}
        shards = sorted(set(objects[_INDEX]["weight_map"].values()))
        least = int(objects[_INDEX]["metadata"]["total_size"])
        n_bytes = sum((folder / name).stat().st_size for name in shards)
    except OSError as error:
        raise _damaged(folder, str(error)) from error
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise _damaged(folder, f"{_INDEX} is no index: {error!r}") from error
    if n_bytes < least:
        raise _damaged(folder, f"{', '.join(shards)} have {n_bytes} bytes, the weights alone {least}")
    for name in shards:
        _object(folder / name, _head(folder / name))


def _object(path: Path, content: bytes) -> dict[str, Any]:
    """The JSON object that a file, or its head, holds."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _damaged(path.parent, f"{path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise _damaged(path.parent, f"{path.name} holds a {type(value).__name__}, not an object")
    return value


def _head(path: Path) -> bytes:
    """The JSON that a safetensors file begins with, behind its length in 8 bytes."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return file.read(min(length, path.stat().st_size))


def _damaged(folder: Path, how: str) -> CheckpointError:
    return CheckpointError(f"the embedded model in {folder} is damaged: {how}; reinstall radixkv")
