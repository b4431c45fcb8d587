"""Writing of result files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from radixkv.errors import ConfigError
from radixkv.lab.bench.environment import provenance


def check_outputs(file: Path | None, folder: Path | None) -> None:
    """Checks before a run that its results can be written.

    Args:
        file: value of ``--output-file``.
        folder: value of ``--plot``; it is created if missing.

    Raises:
        ConfigError: the file or the folder cannot be written, or matplotlib is missing.
    """
    if file is not None:
        append_lines(file, b"")
    if folder is not None:
        from radixkv.lab.bench.report.html_page import require_folder, require_matplotlib

        require_matplotlib()
        require_folder(folder, "--plot")


def open_saver(path: Path | None, bench: str) -> Callable[[Sequence[Mapping[str, object]]], None]:
    """Returns a function that appends results to the file of ``--output-file``; it does nothing without a file.

    Args:
        path: the file.
        bench: name of the benchmark. Each line has it, and the time and the environment of this call.
    """
    if path is None:
        return lambda _: None
    made_at = provenance()

    def save(results: Sequence[Mapping[str, object]]) -> None:
        lines = [msgspec.json.encode({"bench": bench, **result, **made_at}) + b"\n" for result in results]
        append_lines(path, b"".join(lines))

    return save


def append_lines(path: Path, lines: bytes) -> None:
    """Appends lines to the file of ``--output-file``: all of them or none.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        with path.open("ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            remaining = memoryview(lines)
            try:
                while remaining:
                    remaining = remaining[file.write(remaining) :]
            except OSError:
                with suppress(OSError):  # a pipe cannot be truncated
                    file.truncate(size)
                raise
    except OSError as error:
        raise ConfigError(f"cannot write --output-file {path}: {error.strerror}") from None
