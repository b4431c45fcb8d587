"""Data sets: files of JSON lines, or of one JSON array."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from radixkv.errors import ConfigError


class Format(NamedTuple):
    """A format of data sets."""

    name: str
    """The format's name in error texts, with article."""
    item_format: str
    """How an item looks, for error texts."""
    fields: frozenset[str]
    """Fields that every item has, and that no item of another format has all of."""
    workload: str
    """A shipped workload that reads this format."""


TRACE = Format(
    name="a Mooncake trace",
    item_format='{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": ids}',
    fields=frozenset({"timestamp", "input_length", "hash_ids"}),
    workload="trace",
)
PROBLEMS = Format(
    name="a file of problems",
    item_format='{"question": text, "answer": text}',
    fields=frozenset({"question", "answer"}),
    workload="fewshot",
)
MESSAGES = Format(
    name="a file of OpenAI messages",
    item_format='{"messages": OpenAI\'s} or {"conversations": [{"from": who, "value": text}, ...]}',
    fields=frozenset({"messages"}),
    workload="agents",
)
SHAREGPT = MESSAGES._replace(name="a file of ShareGPT's kind", fields=frozenset({"conversations"}))
DOCUMENTS = Format(
    name="a file of documents",
    item_format='{"text": document, "questions": [{"question": text, "answer": text}, ...]}',
    fields=frozenset({"questions"}),
    workload="long-document-qa",
)
FORMATS = (TRACE, PROBLEMS, MESSAGES, SHAREGPT, DOCUMENTS)


def format_of(item: bytes) -> Format | None:
    """Returns the format of a JSON object; None: the format is unknown, or ``item`` is no object."""
    try:
        fields = msgspec.json.decode(item, type=dict[str, msgspec.Raw]).keys()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return next((each for each in FORMATS if each.fields <= fields), None)


MAX_LINE_BYTES = 1 << 26
"""Maximum length of a line; a file with a longer one is no file of JSON lines."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

UNSUPPORTED_FILES = {
    b"\x1f\x8b": "compressed by gzip; unpack it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; unpack it",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"PAR1": "a Parquet file; write its rows as JSON lines",
    b"\xff\xfe": "in UTF-16; save it in UTF-8",
    b"\xfe\xff": "in UTF-16; save it in UTF-8",
}
"""First bytes of unsupported file types, and the error text for each."""

T = TypeVar("T")


@dataclass(frozen=True)
class Items(Generic[T]):
    """The items of a file."""

    items: list[T]
    """The items in the file's order; at least one."""
    n_bad_lines: int
    """Bad lines that were skipped; 0 without ``skip_bad_lines``."""


class _RawItem(NamedTuple):
    """An undecoded item."""

    position: str
    """The line or item number, for error texts."""
    text: bytes


def read_lines(
    path: Path, convert: Callable[[bytes], T], *, expected: Format, skip_bad_lines: bool = False
) -> Items[T]:
    """Reads the items of a UTF-8 file. O(size). One line of a file of lines is in memory at a time.

    Ignores empty lines and a byte order mark, and accepts LF and CRLF.

    Args:
        path: the file.
        convert: converts an item's text to the item, in the file's order; raises ``ValueError`` or ``MsgspecError``
            for a bad item.
        expected: the format that the file should have.
        skip_bad_lines: skip and count bad items instead of raising an error.

    Raises:
        ConfigError: the file cannot be read, has another known format, a bad item, or no good item. The text names
            the file, the line and the fault.
    """
    items: list[T] = []
    faults: list[str] = []
    for position, text in _raw_items(path, expected):
        try:
            items.append(convert(text))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            fault = f"{position} of {path} is not {expected.item_format}: {error}"
            if not items and not faults:
                _check_format(path, text, expected)
            if not skip_bad_lines:
                raise ConfigError(f"{fault}; correct it, or skip such lines with --skip-bad-lines") from None
            faults.append(fault)
    if faults and not items:
        raise ConfigError(f"{path} has only bad lines: {faults[0]}; give another file")
    if not items:
        raise ConfigError(f"the data set {path} is empty; give a file of {expected.item_format} a line")
    return Items(items, len(faults))


def _check_format(path: Path, text: bytes, expected: Format) -> None:
    """Raises ``ConfigError`` if a bad item has another known format."""
    other = format_of(text)
    if other is not None and other.workload != expected.workload:
        raise ConfigError(
            f"{path} is {other.name}; use --workload {other.workload}, "
            f"or give a file of {expected.item_format} a line"
        )


def _raw_items(path: Path, expected: Format) -> Iterator[_RawItem]:
    try:
        with path.open("rb") as file:
            yield from _split(path, file)
    except OSError as error:
        raise ConfigError(
            f"cannot read the data set {path}: {error.strerror}; give a file of {expected.item_format} a line"
        ) from None


def _split(path: Path, file: BufferedReader) -> Iterator[_RawItem]:
    """Yields the file's lines, or its array's items. Never seeks, since the file may be a pipe."""
    head = file.peek(4)
    for first_bytes, problem in UNSUPPORTED_FILES.items():
        if head.startswith(first_bytes):
            raise ConfigError(f"{path} is {problem}")
    if head.startswith(BYTE_ORDER_MARK):
        file.read(len(BYTE_ORDER_MARK))
    has_items = False
    number = 0
    while line := file.readline(MAX_LINE_BYTES):
        number += 1
        if not line.strip():
            continue
        if not has_items and line.lstrip().startswith(b"["):
            yield from _array(path, number - 1, line + file.read())
            return
        if len(line) == MAX_LINE_BYTES:
            raise ConfigError(f"line {number} of {path} has more than {MAX_LINE_BYTES} bytes; give a file of lines")
        has_items = True
        yield _RawItem(f"line {number}", line)


def _array(path: Path, n_lines_before: int, text: bytes) -> Iterator[_RawItem]:
    try:
        items = msgspec.json.decode(text, type=list[msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a JSON array: {_bad_line(text, n_lines_before)}{error}") from None
    return (_RawItem(f"item {number}", bytes(item)) for number, item in enumerate(items, 1))


def _bad_line(text: bytes, n_lines_before: int) -> str:
    """Returns the number of the line in which a text is not JSON, as far as Python's parser reports it."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return f"line {n_lines_before + error.lineno}: "
    except (ValueError, RecursionError):
        pass
    return ""
