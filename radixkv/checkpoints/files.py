"""Reading the text and JSON files of a checkpoint, and the headers of its weight files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard

from radixkv.errors import CheckpointError


def read_text(path: Path, *, max_characters: int | None = None) -> str | None:
    """Returns the text of a file; None if there is no such file.

    Args:
        path: of the file.
        max_characters: the most that the file may have; None: any number.

    Raises:
        CheckpointError: the file is too large, is not UTF-8, cannot be read, or is no regular file: reading a pipe
            may never end.
    """
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path} cannot be read: it is not a regular file; fetch the file again")
        with path.open(encoding="utf-8") as file:
            text = file.read(-1 if max_characters is None else max_characters + 1)
        if max_characters is not None and len(text) > max_characters:
            raise CheckpointError(
                f"{path} has more than {max_characters} characters; check that it is the right file"
            )
        return text
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; let the server's user read it") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; fetch the file again") from error


def read_object(path: Path, *, max_characters: int | None = None) -> dict[str, Any] | None:
    """Returns the object in a JSON file; None if there is no such file. The rest is as for ``read_text``."""
    text = read_text(path, max_characters=max_characters)
    if text is None:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}; fetch the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} contains a JSON {type(content).__name__}, not an object; fetch the file again"
        )
    return content


def read_header(path: Path) -> bytes:
    """Returns the JSON header of a safetensors file, which follows 8 bytes with its length. Raises ``OSError``."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return file.read(min(length, path.stat().st_size))


def is_integer(value: object) -> TypeGuard[int]:
    """Returns whether a JSON value is an integer; ``true`` is not, although Python's bool is an int."""
    return isinstance(value, int) and not isinstance(value, bool)
