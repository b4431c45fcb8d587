"""The model that comes with the package."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from radixkv.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", _INDEX)


def embedded_folder() -> Path:
    """The folder of the embedded model, which lies beside this module.

    Raises:
        CheckpointError: the package lies in an archive, or was not installed whole.

    Cost: below a millisecond.
    """
    folder = resources.files(__package__).joinpath("tiny")
    if not isinstance(folder, Path):
        raise CheckpointError("radixkv runs out of an archive, where no model can be read; install it unpacked")
    check_whole(folder)
    return folder


def check_whole(folder: Path) -> None:
    """Refuses what an installation leaves that stopped halfway or forgot data; looks at names and sizes only.

    Raises:
        CheckpointError: a file is missing, the index is none, or there is less than all weights.
    """
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        shards = sorted(set(index["weight_map"].values()))
        sizes = {name: (folder / name).stat().st_size for name in (*_FILES, *shards)}
    except (OSError, ValueError) as error:
        raise _damaged(folder, str(error)) from error
    n_bytes, least = sum(sizes[name] for name in shards), index["metadata"]["total_size"]
    if n_bytes < least:
        raise _damaged(folder, f"{', '.join(shards)} have {n_bytes} bytes, the weights alone {least}")


def _damaged(folder: Path, how: str) -> CheckpointError:
    return CheckpointError(f"the embedded model in {folder} is damaged: {how}; reinstall radixkv")
