"""Files of JSON lines."""

import json
from pathlib import Path
from typing import Any


def write_lines(path: Path, *lines: Any) -> Path:
    """Writes a file of these lines, each an object or its bytes; returns its path."""
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in encoded))
    return path


def read_lines(path: Path) -> list[Any]:
    """Returns the object of each line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
