"""What rank 0 and another rank send each other, over sockets that both have inherited."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.step.plan import StepPlan
from radixkv.settings.config import Device

_LENGTH = struct.Struct("<I")


class RankStart(msgspec.Struct, frozen=True, tag=True):
    """The first frame to a rank: what it computes."""

    rank: int
    model: str
    """Folder of the checkpoint."""
    device: Device
    """Kind of the ranks' devices."""
    settings: DeviceSettings
    parent_pid: int
    """Process of rank 0."""


class RankStore(msgspec.Struct, frozen=True, tag=True):
    """Rank 0's answer when all have come to connect their devices."""

    path: str
    """File by which they find each other."""


class RankValue(msgspec.Struct, frozen=True, tag=True):
    """A rank's value of ``RankGroup.minimum``, and rank 0's answer to all."""

    value: int


class RankRefused(msgspec.Struct, frozen=True, tag=True):
    """The answer of a rank that cannot compute."""

    message: str


class RankMemory(msgspec.Struct, frozen=True, tag=True):
    """The first frame for a rank's copies: the host memory that the ranks share."""

    n_bytes: int
    index: int
    """This and what follows are those of the rank's ``SlotPart``."""
    n_parts: int
    stores: bool
    rank: int
    n_ranks: int


class RankCopy(msgspec.Struct, frozen=True, tag=True):
    """A copy between pages and slots, and of states, which all ranks do."""

    ticket: int
    """Rank 0's."""
    is_load: bool
    slots: list[int]
    pages: list[int]
    states: list[tuple[int, int]] = []


class RankSlots(msgspec.Struct, frozen=True, tag=True):
    """How many leading slots a rank can use; the first says that its memory is open."""

    n_usable: int
    is_growing: bool
    """Whether there may be more later."""


class RankCopied(msgspec.Struct, frozen=True, tag=True):
    """A rank's end of a copy; see ``FinishedCopy``."""

    ticket: int
    seconds: float
    error: str | None


class RankAdapterRead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An adapter that a rank shall read beside steps; see ``DeviceAdapters.read``."""

    ticket: int
    """Number of this read."""
    name: str
    path: str


class RankAdapterAnswer(msgspec.Struct, frozen=True, tag=True):
    """A rank's answer to ``RankAdapterRead`` or ``RankAdapterFill``: one of these, none of them after a copy."""

    ticket: int
    """Ticket of the question."""
    digest: str | None = None
    """Digest of what it has read."""
    refusal: str | None = None
    """Why the adapter cannot be read, or not be served."""
    failure: str | None = None
    """Why the rank failed."""


class RankAdapterCopy(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A loaded adapter that shall come into a free slot; see ``DeviceAdapters.copy``."""

    ticket: int
    """Number of this copy, which no read has."""
    digest: str


class RankAdapterFill(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A copy that a rank shall do beside steps."""

    ticket: int
    """Ticket of its ``RankAdapterCopy``."""


class RankAdapterWithdrawn(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An adapter that leaves its slot: no row of the plans behind this frame asks for it."""

    digest: str


class RankAdapterPut(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An adapter that is loaded, or in its slot, for the plans behind this frame."""

    ticket: int
    """Ticket of its ``RankAdapterRead`` or ``RankAdapterCopy``."""


class RankAdapterDiscarded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An adapter that was read or copied for nothing, or could not be read."""

    ticket: int
    """Ticket of its ``RankAdapterRead`` or ``RankAdapterCopy``."""


class RankAdapterRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An adapter that no row of the plans behind this frame asks for."""

    digest: str


AdapterFrame = (
    RankAdapterRead
    | RankAdapterCopy
    | RankAdapterFill
    | RankAdapterPut
    | RankAdapterDiscarded
    | RankAdapterWithdrawn
    | RankAdapterRemoved
)
"""What a rank gets between plans: what it shall do with adapters, in this order."""

_OfStart = RankStart | RankStore | RankValue | RankRefused
_OfCopies = RankMemory | RankCopy | RankSlots | RankCopied


class Frames:
    """Frames over a stream socket: an end of the stream is the death of the other process.

    Args:
        connection: connected, blocking.
        max_send_s: how long the other process may take to receive a frame; None: for ever.
    """

    def __init__(self, connection: socket.socket, *, max_send_s: float | None = None) -> None:
        self._connection = connection
        self._max_send_s = max_send_s

    def send(self, frame: bytes) -> None:
        """Sends a frame. Raises ``OSError`` if the other process has ended, or does not take it."""
        self._connection.settimeout(self._max_send_s)
        self._connection.sendall(_LENGTH.pack(len(frame)) + frame)
        self._connection.settimeout(None)

    def receive(self) -> bytes | None:
        """Waits for the next frame; None if the other process has ended."""
        header = self._read(_LENGTH.size)
        return None if header is None else self._read(*_LENGTH.unpack(header))

    def fileno(self) -> int:
        """Returns the descriptor, which can be read when a frame comes or the stream ends."""
        return self._connection.fileno()

    def close(self) -> None:
        """Ends the stream."""
        self._connection.close()

    def _read(self, n_bytes: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < n_bytes:
            try:
                part = self._connection.recv(n_bytes - len(parts))
            except ConnectionResetError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)


def encode(message: _OfStart | _OfCopies | StepPlan | AdapterFrame | RankAdapterAnswer) -> bytes:
    """Returns the frame of a message."""
    return msgspec.msgpack.encode(message)


def decode(frame: bytes, kind: Any) -> Any:
    """Returns the message of a frame, of a type or a union."""
    return msgspec.msgpack.decode(frame, type=kind)
