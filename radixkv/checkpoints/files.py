"""JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard

from radixkv.errors import CheckpointError


def read_object(path: Path) -> dict[str, Any] | None:
    """The object that a JSON file holds; None if there is no such file. Raises ``CheckpointError``."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; fetch the checkpoint again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not an object; fetch the checkpoint again")
    return content


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a JSON value is a whole number, which ``true`` is not."""
    return isinstance(value, int) and not isinstance(value, bool)
