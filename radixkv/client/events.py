"""Incremental parser of server-sent events."""

from __future__ import annotations

from collections.abc import Iterator


class EventReader:
    """Splits a byte stream into the data of its events.

    Lines end in LF, CRLF or CR only: other line separators, such as U+2028 inside JSON, are text. Comments and
    fields other than ``data`` are skipped; several ``data`` lines of one event are joined by LF.
    """

    def __init__(self) -> None:
        self._partial: list[bytes] = []
        """Pieces of a line whose end has not arrived; joined once, since a line may be megabytes in many pieces."""
        self._data: list[bytes] = []

    def push(self, piece: bytes) -> Iterator[bytes]:
        """Yields the data of each event that ``piece`` completes. O(size)."""
        has_end = b"\n" in piece or b"\r" in piece or bool(self._partial and self._partial[-1].endswith(b"\r"))
        self._partial.append(piece)
        if not has_end:
            return
        text = b"".join(self._partial)
        if text.endswith(b"\r"):  # an LF may follow in the next piece
            text, held_back = text[:-1], b"\r"
        else:
            held_back = b""
        *lines, last = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._partial = [last + held_back]
        for line in lines:
            yield from self._add_line(line)

    def finish(self) -> Iterator[bytes]:
        """Yields the data of an event that the stream's end left without its closing blank line."""
        line = b"".join(self._partial).rstrip(b"\r")
        self._partial = []
        yield from self._add_line(line)
        yield from self._add_line(b"")

    def _add_line(self, line: bytes) -> Iterator[bytes]:
        if not line:
            if self._data:
                yield b"\n".join(self._data)
                self._data = []
            return
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
