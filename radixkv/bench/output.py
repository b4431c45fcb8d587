"""Files of results: checked before a run, and given whole lines after it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from radixkv.errors import ConfigError


def check_outputs(file: Path | None, folder: Path | None) -> None:
    """What cannot be written shows before the run, not after it.

    Args:
        file: of ``--output-file``.
        folder: of ``--plot``; it is made.

    Raises:
        ConfigError: one of them cannot be written, or there is nothing to draw with.
    """
    if file is not None:
        append_lines(file, b"")
    if folder is not None:
        from radixkv.bench.report.html_page import require_folder, require_matplotlib

        require_matplotlib()
        require_folder(folder, "--plot")


def append_lines(path: Path, lines: bytes) -> None:
    """Appends lines to the file of ``--output-file``: all of them, or nothing. Raises ``ConfigError``."""
    try:
        with path.open("ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            rest = memoryview(lines)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                with suppress(OSError):  # what has no size, such as a pipe, cannot be cut
                    file.truncate(size)
                raise
    except OSError as error:
        raise ConfigError(f"cannot write --output-file {path}: {error.strerror}") from None
