"""Files of one JSON item a line, or of one JSON array of items."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from radixkv.bench.workloads.datasets.formats import Format, format_of
from radixkv.errors import ConfigError

MAX_LINE_BYTES = 1 << 26
"""A file with a longer line is something else."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

OTHER_FILES = {
    b"\x1f\x8b": "compressed by gzip; unpack it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; unpack it",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"PAR1": "a Parquet file; write its rows as JSON lines",
    b"\xff\xfe": "in UTF-16; save it in UTF-8",
    b"\xfe\xff": "in UTF-16; save it in UTF-8",
}
"""What files begin with that are given by mistake."""

T = TypeVar("T")


@dataclass(frozen=True)
class Items(Generic[T]):
    """What a file holds, in its order."""

    items: list[T]
    """At least one."""
    n_bad_lines: int
    """Left out; 0 unless that was asked for."""


class _Text(NamedTuple):
    """An item as the file has it."""

    place: str
    text: bytes


def read_lines(
    path: Path, convert: Callable[[bytes], T], *, wanted: Format, skip_bad_lines: bool = False
) -> Items[T]:
    """The items of a file in UTF-8. O(file); of a file of lines, one is in memory at a time.

    Empty lines, a byte order mark and the kind of line ends make no difference.

    Args:
        path: the file.
        convert: an item's text to the item, called in order; raises ``ValueError`` or ``MsgspecError`` for a bad
            one.
        wanted: what the file should be.
        skip_bad_lines: count bad items instead of refusing them.

    Raises:
        ConfigError: naming file, line and fault; no file that can be read, another known format, or no good item.
    """
    items: list[T] = []
    faults: list[str] = []
    for place, text in _texts(path, wanted):
        try:
            items.append(convert(text))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            fault = f"{place} of {path} is not {wanted.shape}: {error}"
            if not items and not faults:
                _check_format(path, text, wanted)
            if not skip_bad_lines:
                raise ConfigError(f"{fault}; mend it, or have such lines left out (--skip-bad-lines)") from None
            faults.append(fault)
    if faults and not items:
        raise ConfigError(f"{path} has nothing else than bad lines: {faults[0]}; give another file")
    if not items:
        raise ConfigError(f"the data set {path} is empty; give a file of {wanted.shape} a line")
    return Items(items, len(faults))


def _check_format(path: Path, text: bytes, wanted: Format) -> None:
    """Raises ``ConfigError`` if a bad item is one of another format."""
    other = format_of(text)
    if other is not None and other.shape != wanted.shape:
        raise ConfigError(
            f"{path} is {other.name}; use --workload {other.workload}, or give a file of {wanted.shape} a line"
        )


def _texts(path: Path, wanted: Format) -> Iterator[_Text]:
    try:
        with path.open("rb") as file:
            yield from _separated(path, file)
    except OSError as error:
        raise ConfigError(
            f"cannot read the data set {path}: {error.strerror}; give a file of {wanted.shape} a line"
        ) from None


def _separated(path: Path, file: BufferedReader) -> Iterator[_Text]:
    """The file's lines, or its array's items. Never seeks: the file may be a pipe."""
    head = file.peek(4)
    for beginning, what in OTHER_FILES.items():
        if head.startswith(beginning):
            raise ConfigError(f"{path} is {what}")
    if head.startswith(BYTE_ORDER_MARK):
        file.read(len(BYTE_ORDER_MARK))
    is_begun = False
    number = 0
    while line := file.readline(MAX_LINE_BYTES):
        number += 1
        if not line.strip():
            continue
        if not is_begun and line.lstrip().startswith(b"["):
            yield from _array(path, number - 1, line + file.read())
            return
        if len(line) == MAX_LINE_BYTES:
            raise ConfigError(f"line {number} of {path} has more than {MAX_LINE_BYTES} bytes; give a file of lines")
        is_begun = True
        yield _Text(f"line {number}", line)


def _array(path: Path, n_lines_before: int, text: bytes) -> Iterator[_Text]:
    try:
        items = msgspec.json.decode(text, type=list[msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a JSON array: {_place(text, n_lines_before)}{error}") from None
    return (_Text(f"item {number}", bytes(item)) for number, item in enumerate(items, 1))


def _place(text: bytes, n_lines_before: int) -> str:
    """Where a text stops being JSON, as far as Python's own reader can tell."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return f"line {n_lines_before + error.lineno}: "
    except (ValueError, RecursionError):
        pass
    return ""
