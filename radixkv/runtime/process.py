"""The runtime process: ``python -m radixkv.runtime.process``, spawned by the frontend.

One JSON ``Start`` line comes on standard input, which the frontend then keeps open: its end is the frontend's. The
only output is a ``Fatal`` line if the process ends because of an error. Everything else goes over the socket.

With ``--check`` it only looks whether settings, machine and ``config.json`` fit: before weights are fetched.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import zmq

from radixkv.errors import ConfigError, RadixKVError, RequestError, WireError
from radixkv.wire import (
    LOCK_NAME,
    MAX_FRAME_BYTES,
    WIRE_VERSION,
    Drain,
    Fatal,
    FromRuntime,
    Heartbeat,
    Hello,
    Start,
    Stats,
    ToRuntime,
    decode_to_runtime,
    encode,
    endpoint,
)

if TYPE_CHECKING:
    from radixkv.runtime.loop import Loop

HEARTBEAT_S = 0.5
LINGER_MS = 1000
MAX_START_BYTES = 1 << 20
CHECK_PARTS = 200
"""Looking at every invariant takes no more than one in so many of the seconds, for a request may come meanwhile."""


def main() -> int:
    """Runs until the frontend is gone or drains, or has checked. Returns the exit code."""
    # The frontend owns the shutdown, also where a service manager signals every process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    output = _take_output()
    logging.basicConfig(format="radixkv: %(message)s")  # on standard error, as the frontend's lines
    logging.getLogger("radixkv").setLevel(logging.INFO)
    try:
        start = _read_start()
        if sys.argv[1:] == ["--check"]:
            _check(start)
        else:
            _run(start)
    except RadixKVError as error:
        _report(output, type(error).__name__, str(error))
        return 1
    except Exception as error:
        _report(output, type(error).__name__, f"{type(error).__name__}: {error}")
        raise
    return 0


def _take_output() -> BinaryIO:
    """Standard output for this module alone; what libraries print goes to standard error."""
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return output


def _report(output: BinaryIO, kind: str, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        output.write(msgspec.json.encode(Fatal(kind, " ".join(text.split()))) + b"\n")


def _read_start() -> Start:
    line = bytearray()
    while not line.endswith(b"\n"):
        part = os.read(0, 65536)
        if not part or len(line) > MAX_START_BYTES:
            raise WireError("standard input has no start line; `radixkv serve` starts this process")
        line += part
    try:
        return msgspec.json.decode(line, type=Start)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"the start line is not a Start message: {error}") from error


def _check(start: Start) -> None:
    from radixkv.checkpoints import resolve
    from radixkv.runtime.device.factory import resolve_config

    logging.disable()  # the process that runs says it again
    resolve_config(start.engine, resolve(start.folder, load_format="dummy"))


def _end_with_frontend(socket_path: Path) -> None:
    """Ends this process when standard input does, at once, whatever the other thread is computing."""
    while os.read(0, 4096):
        pass
    _remove(socket_path)
    os._exit(0)


def _remove(socket_path: Path) -> None:
    with contextlib.suppress(OSError):
        socket_path.unlink(missing_ok=True)
        (socket_path.parent / LOCK_NAME).unlink(missing_ok=True)
        socket_path.parent.rmdir()


def _run(start: Start) -> None:
    socket_path = Path(start.socket_path)
    with _lock(socket_path), _bound(socket_path) as socket:
        # Only with the lock: this thread removes the socket, which without it is another runtime's.
        threading.Thread(target=_end_with_frontend, args=(socket_path,), daemon=True).start()
        # Imported here because it takes seconds, which the frontend's end and a taken lock must not wait for.
        from radixkv.checkpoints import resolve
        from radixkv.runtime.loop import build_loop

        try:
            loop = build_loop(start.engine, resolve(start.folder, load_format=start.engine.model.load_format))
        except (MemoryError, RuntimeError) as error:
            # torch has no narrower error for this.
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            raise ConfigError(
                f"there is not enough memory: {error}; lower --kv-cache-memory-bytes or "
                "--gpu-memory-utilization, --max-num-seqs or --max-model-len"
            ) from error
        # A full collection stops a loop with a million tree nodes for half a second, and finds nothing: the tree
        # frees its links itself.
        gc.collect()
        gc.freeze()
        gc.disable()
        Server(socket, loop).run()


@contextlib.contextmanager
def _lock(socket_path: Path) -> Iterator[None]:
    """Makes this the only runtime on the path: a second ZeroMQ bind would succeed and take the traffic.

    Raises:
        ConfigError: another runtime has the path, or the folder is not private.
    """
    folder = socket_path.parent
    mode = folder.stat()
    if mode.st_uid != os.getuid() or stat.S_IMODE(mode.st_mode) & 0o077:
        raise ConfigError(f"the socket's folder {folder} is open to other users; it must be yours, with mode 0700")
    with open(folder / LOCK_NAME, "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another runtime already serves {socket_path}; use another path") from None
        yield


@contextlib.contextmanager
def _bound(socket_path: Path) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    # No high-water mark: a full one would drop tokens or stop the loop, and what can pile up is bounded by the
    # answers of the requests that were admitted.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    try:
        socket.bind(endpoint(str(socket_path)))
        yield socket
    finally:
        socket.close()
        context.term()


@dataclass
class Server:
    """A loop behind a socket, for the one frontend that shook hands."""

    socket: zmq.Socket[bytes]
    loop: Loop
    frames_dropped: int = 0
    _peer: bytes | None = None
    _is_draining: bool = False
    _is_checked: bool = True
    """Whether every invariant was looked at since the last step."""
    _next_check: float = 0.0
    """When that may be done again."""

    def run(self) -> None:
        """Until a ``Drain`` and the end of all work. When idle for a heartbeat, looks at every invariant once, but
        not before ``_next_check``.

        Raises:
            WireError: the frontend is of another version, or gone.
            InvariantError: a bug in radixkv.
        """
        silent_since = time.monotonic()
        while self.loop.has_work or not self._is_draining:
            self._receive(0 if self.loop.has_work else int(HEARTBEAT_S * 1000))
            has_turned = self.loop.has_work
            if has_turned and self._send(self.loop.turn()):
                silent_since = time.monotonic()
            elif time.monotonic() - silent_since >= HEARTBEAT_S:
                self._send([Heartbeat()])
                silent_since = time.monotonic()
                if not (has_turned or self._is_checked) and silent_since >= self._next_check:
                    self.loop.check()
                    self._is_checked = True
                    self._next_check = silent_since + CHECK_PARTS * (time.monotonic() - silent_since)
            self._is_checked = self._is_checked and not has_turned

    def _receive(self, wait_ms: int) -> None:
        """Takes all that has come, after at most ``wait_ms`` for the first."""
        if not self.socket.poll(wait_ms):
            return
        while True:
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._decode(parts)
            match message:
                case None:
                    self.frames_dropped += 1
                case Hello():
                    self._shake_hands(parts[0], message)
                case _:
                    self._is_draining = self._is_draining or isinstance(message, Drain)
                    self._send(self.loop.receive(message))

    def _decode(self, parts: list[bytes]) -> ToRuntime | None:
        """The message; None for what the frontend cannot have meant."""
        if len(parts) != 2:
            return None
        try:
            message = decode_to_runtime(parts[1])
        except (WireError, RequestError):
            return None
        is_greeting = isinstance(message, Hello)
        return message if is_greeting == (self._peer is None) and self._peer in (None, parts[0]) else None

    def _shake_hands(self, peer: bytes, hello: Hello) -> None:
        self._peer = peer
        self._send([self.loop.ready])
        if hello.version != WIRE_VERSION:
            raise WireError(
                f"the frontend speaks wire version {hello.version} and the runtime {WIRE_VERSION}; "
                "both must come from the same installation"
            )

    def _send(self, messages: list[FromRuntime]) -> bool:
        """Sends all together; whether there was anything to send. Raises if the frontend is gone."""
        if self._peer is None or not messages:
            return False
        try:
            self.socket.send_multipart([self._peer, *map(self._frame, messages)])
        except zmq.ZMQError as error:
            raise WireError(f"the frontend closed its socket: {error}") from error
        return True

    def _frame(self, message: FromRuntime) -> bytes:
        if isinstance(message, Stats):
            message = msgspec.structs.replace(message, frames_dropped_total=self.frames_dropped)
        return encode(message)


if __name__ == "__main__":
    sys.exit(main())
