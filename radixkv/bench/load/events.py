"""Server-sent events, read as bytes arrive."""

from __future__ import annotations

from collections.abc import Iterator


class EventReader:
    """Cuts a byte stream into the data of its events.

    Lines end in LF, CRLF or CR only: a line separator inside JSON text, such as U+2028, is text. Comments and
    fields other than ``data`` are skipped; several ``data`` lines of one event are joined by LF.
    """

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        """Of a line whose end has not come; joined once, since a line may be megabytes in many pieces."""
        self._data: list[bytes] = []

    def push(self, piece: bytes) -> Iterator[bytes]:
        """The data of each event that ``piece`` completes. O(size)."""
        has_end = b"\n" in piece or b"\r" in piece or bool(self._rest and self._rest[-1].endswith(b"\r"))
        self._rest.append(piece)
        if not has_end:
            return
        text = b"".join(self._rest)
        if text.endswith(b"\r"):  # an LF may follow in the next piece
            text, held = text[:-1], b"\r"
        else:
            held = b""
        *lines, last = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = [last + held]
        for line in lines:
            yield from self._line(line)

    def finish(self) -> Iterator[bytes]:
        """What an event without its closing blank line held when the stream ended."""
        line = b"".join(self._rest).rstrip(b"\r")
        self._rest = []
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
