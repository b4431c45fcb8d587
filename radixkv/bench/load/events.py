"""Server-sent events, read as bytes arrive."""

from __future__ import annotations

from collections.abc import Iterator


class EventReader:
    """Cuts a byte stream into the data of its events.

    Lines end in LF, CRLF or CR only: a line separator inside JSON text, such as U+2028, is text. Comments and
    fields other than ``data`` are skipped; several ``data`` lines of one event are joined by LF.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def push(self, piece: bytes) -> Iterator[bytes]:
        """The data of each event that ``piece`` completes. O(size)."""
        text = self._rest + piece
        if text.endswith(b"\r"):  # an LF may follow in the next piece
            text, held = text[:-1], b"\r"
        else:
            held = b""
        *lines, last = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = last + held
        for line in lines:
            yield from self._line(line)

    def finish(self) -> Iterator[bytes]:
        """What an event without its closing blank line held when the stream ended."""
        line, self._rest = self._rest.rstrip(b"\r"), b""
        yield from self._line(line)
        yield from self._line(b"")

    def _line(self, line: bytes) -> Iterator[bytes]:
        if not line:
            if self._data:
                yield b"\n".join(self._data)
                self._data = []
            return
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
