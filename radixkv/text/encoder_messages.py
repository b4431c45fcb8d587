"""What the process that encodes texts is asked, and what it answers: frames of a length and msgpack."""

from __future__ import annotations

import socket
import struct

import msgspec

_LENGTH = struct.Struct("<Q")


class EncodeTexts(msgspec.Struct, frozen=True):
    """Asks for the ids of texts. Answered by a list of ``EncodedText``, unless the process ends first."""

    texts: list[str]
    deadline_s: float
    """The process ends if it takes longer."""
    adds_special_tokens: bool
    limit: int | None
    """Most tokens of a text."""


class EncodedText(msgspec.Struct, frozen=True):
    """The ids of a text, or why there are none."""

    n_tokens: int = 0
    ids: bytes | None = None
    """Little-endian int32. None: there are more than ``limit``, or an error."""
    error: str = ""


def send_frame(connection: socket.socket, payload: bytes) -> None:
    """Sends a frame. Raises ``OSError``."""
    connection.sendall(_LENGTH.pack(len(payload)))
    connection.sendall(payload)


def receive_frame(connection: socket.socket) -> bytes:
    """Returns the next frame. Raises ``EOFError`` at the end of the connection, and ``OSError``."""
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    return _receive(connection, length)


def _receive(connection: socket.socket, n_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < n_bytes:
        part = connection.recv(min(n_bytes - len(received), 1 << 20))
        if not part:
            raise EOFError
        received += part
    return bytes(received)
