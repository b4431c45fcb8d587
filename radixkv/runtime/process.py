"""The runtime process: ``python -m radixkv.runtime.process``, spawned by the frontend.

The process reads one JSON ``Start`` line from standard input. The frontend then keeps that pipe open; when the pipe
ends, the frontend is gone and the process exits. It writes a ``Fatal`` line to standard output if an error ends it.
All other messages go over the socket.

With ``--check`` it only checks, before weights are downloaded, that settings, machine and ``config.json`` fit.
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
from radixkv.runtime.events.publisher import EventPublisher
from radixkv.wire.messages import (
    LOCK_NAME,
    MAX_FRAME_BYTES,
    WIRE_VERSION,
    Drain,
    Fatal,
    FromRuntime,
    Heartbeat,
    Hello,
    Start,
    ToRuntime,
    decode_to_runtime,
    encode,
    endpoint,
)
from radixkv.wire.stats import Stats

if TYPE_CHECKING:
    from radixkv.runtime.events.kv_events import KVEvents
    from radixkv.runtime.loop import Loop

HEARTBEAT_S = 0.5
LINGER_MS = 1000
MAX_ARRIVALS_WAIT_MS = 2
"""How long the process waits for messages before it asks again whether the device still computes."""
REPLAY_WAIT_MS = 5
"""Wait of an idle process between two parts of a replay of events."""
MAX_START_BYTES = 1 << 20
_NUMBER_BYTES = 8
"""Most that the lock's file has: the number of a batch of events."""
CHECK_INTERVAL_FACTOR = 200
"""The next idle check waits this many times the duration of the last one: a request that arrives during a check has
to wait for it."""


def main() -> int:
    """Serves until the frontend is gone or has drained it, or runs the check. Returns the exit code."""
    # The frontend owns the shutdown, even if a service manager signals every process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    output = _claim_stdout()
    logging.basicConfig(format="radixkv: %(message)s")  # to standard error, like the frontend's log
    logging.getLogger("radixkv").setLevel(logging.INFO)
    try:
        start = _read_start()
        if sys.argv[1:] == ["--check"]:
            _preflight(start)
        else:
            _serve(start)
    except RadixKVError as error:
        _write_fatal(output, type(error).__name__, str(error))
        return 1
    except Exception as error:
        _write_fatal(output, type(error).__name__, f"{type(error).__name__}: {error}")
        raise
    return 0


def _claim_stdout() -> BinaryIO:
    """Takes standard output for ``Fatal`` lines only; redirects what libraries print to standard error."""
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return output


def _write_fatal(output: BinaryIO, kind: str, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        output.write(msgspec.json.encode(Fatal(kind, " ".join(text.split()))) + b"\n")


def _read_start() -> Start:
    line = bytearray()
    while not line.endswith(b"\n"):
        part = os.read(0, 65536)
        if not part or len(line) > MAX_START_BYTES:
            raise WireError("standard input has no start line; run `radixkv serve`, which starts this process")
        line += part
    try:
        return msgspec.json.decode(line, type=Start)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"the start line is not a Start message: {error}") from error


def _preflight(start: Start) -> None:
    from radixkv.checkpoints import resolve
    from radixkv.runtime.device.factory import look_at_machine, resolve_config
    from radixkv.runtime.device.machine import check_gpus
    from radixkv.runtime.open_loop import check_shared_store

    logging.disable()  # the serving process logs the same again
    machine, task = look_at_machine(start.engine.model.device), start.engine.model.task
    resolved = resolve_config(start.engine, resolve(start.folder, load_format="dummy", task=task), machine)
    if resolved.device == "cuda" and machine is not None and start.data_parallel_size > 1:
        check_gpus(machine, start.engine.model.tensor_parallel_size, start.data_parallel_size)
    check_shared_store(start.engine.cache.cache_url)
    with _publisher(start):
        pass  # the endpoints are free


def _exit_with_frontend(socket_path: Path) -> None:
    """Exits the process as soon as standard input ends, even in the middle of a step."""
    while os.read(0, 4096):
        pass
    _remove_socket(socket_path)
    os._exit(0)


def _remove_socket(socket_path: Path) -> None:
    with contextlib.suppress(OSError):
        socket_path.unlink(missing_ok=True)
        (socket_path.parent / LOCK_NAME).unlink(missing_ok=True)
        socket_path.parent.rmdir()


def _serve(start: Start) -> None:
    socket_path = Path(start.socket_path)
    with _lock(socket_path) as lock, open_socket(socket_path) as socket, _publisher(start, lock) as publisher:
        # Started only with the lock held: the thread removes the socket, which might be another runtime's.
        threading.Thread(target=_exit_with_frontend, args=(socket_path,), daemon=True).start()
        # Imported here because it takes seconds: a taken lock or a vanished frontend is noticed before.
        gc.disable()  # collections would look at all that torch defines, over and over: a seventh of its import
        from radixkv.checkpoints import resolve
        from radixkv.runtime.device.start_times import StartTimes
        from radixkv.runtime.open_loop import build_loop

        times = StartTimes.of_process()
        times.end("imports")
        tokenizer_folder = Path(start.tokenizer_folder or start.folder)
        model = start.engine.model
        try:
            loop = build_loop(
                start.engine,
                resolve(
                    start.folder,
                    load_format=model.load_format,
                    tokenizer_folder=tokenizer_folder,
                    task=model.task,
                ),
                tokenizer_folder,
                warms_grammars=True,
                times=times,
            )
        except (MemoryError, RuntimeError) as error:
            # torch raises a plain RuntimeError when an allocation fails.
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            raise ConfigError(
                f"there is not enough memory: {error}; lower --kv-cache-memory-bytes or "
                "--gpu-memory-utilization, --max-num-seqs or --max-model-len"
            ) from error
        # A full collection stops a loop with a million tree nodes for half a second and finds nothing: the tree
        # unlinks its nodes itself.
        gc.collect()
        gc.freeze()
        events = None
        if start.engine.kv_events is not None and publisher is not None:
            from radixkv.runtime.assemble import open_event_log
            from radixkv.runtime.events.kv_events import KVEvents

            log = open_event_log(loop, shows_salted_tokens=start.engine.kv_events.salted_token_ids)
            events = KVEvents(log, publisher, start.data_parallel_rank)
        try:
            RuntimeServer(socket, loop, events).run()
        finally:  # a lost device may have other processes
            loop.close()


def _publisher(
    start: Start, lock: BinaryIO | None = None
) -> contextlib.AbstractContextManager[EventPublisher | None]:
    """Binds the endpoints of cache events, before the model is loaded. Raises ``ConfigError`` if one is taken.

    The lock's file gets the number of the next batch, which the frontend reads there when this process is dead.
    """
    if start.engine.kv_events is None:
        return contextlib.nullcontext()

    def keep_number(number: int) -> None:
        if lock is not None:
            os.pwrite(lock.fileno(), number.to_bytes(_NUMBER_BYTES, "big"), 0)

    return contextlib.closing(EventPublisher(start.engine.kv_events, start.first_event_number, keep_number))


@contextlib.contextmanager
def _lock(socket_path: Path) -> Iterator[BinaryIO]:
    """Locks the socket's path: a second runtime's ZeroMQ bind would succeed and take the traffic.

    Yields the lock's file, which is empty.

    Raises:
        ConfigError: another runtime has the lock, other users may open the folder, or it has other files under the
            names of the socket and the lock.
    """
    folder = socket_path.parent
    mode = folder.stat()
    if mode.st_uid != os.getuid() or stat.S_IMODE(mode.st_mode) & 0o077:
        raise ConfigError(f"the socket's folder {folder} is open to other users; it must be yours, with mode 0700")
    # ZeroMQ's bind deletes whatever has the socket's name, and opening a symbolic link would lock another file.
    _check_kind(socket_path, stat.S_IFSOCK)
    _check_kind(folder / LOCK_NAME, stat.S_IFREG)
    with open(os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another runtime already serves {socket_path}; use another path") from None
        if os.fstat(lock.fileno()).st_size > _NUMBER_BYTES:
            raise ConfigError(
                f"{folder / LOCK_NAME} is another file than the runtime makes there; use another path"
            )
        lock.truncate()  # only now: the number in it may be another runtime's
        yield lock


def _check_kind(path: Path, kind: int) -> None:
    """Raises ``ConfigError`` if a path exists and is of another kind (of ``stat.S_IFMT``)."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_IFMT(path.lstat().st_mode) != kind:
            raise ConfigError(f"{path} is another file than the runtime makes there; use another path")


@contextlib.contextmanager
def open_socket(socket_path: Path) -> Iterator[zmq.Socket[bytes]]:
    """Binds the socket to which the frontend connects, until the context ends."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    # No high-water mark: reaching it would drop tokens or block the loop. The outputs of the admitted requests
    # bound the memory that queued messages can take.
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
class RuntimeServer:
    """Runs the loop with messages from a socket, for the one frontend that has shaken hands."""

    socket: zmq.Socket[bytes]
    loop: Loop
    events: KVEvents | None = None
    """Publishes the loop's cache events; None: nobody does."""
    frames_dropped: int = 0
    peer: bytes | None = None
    """The address of the frontend; None until it has shaken hands."""
    _is_draining: bool = False
    _is_checked: bool = True
    """Whether every invariant was checked since the last step."""
    _next_check: float = 0.0
    """Earliest time of the next check, on ``time.monotonic``."""

    def run(self) -> None:
        """Serves until a ``Drain`` has come and no work is left.

        When idle for a heartbeat, checks every invariant once, but not before ``_next_check``.

        Raises:
            WireError: the frontend has another wire version, or is gone.
            DeviceLost: the device cannot be used any more.
            InvariantError: a bug in radixkv.
        """
        silent_since = time.monotonic()
        while self.loop.has_work or not self._is_draining:
            can_turn = self.loop.has_work and not self.loop.is_waiting
            if can_turn:
                self._receive_arrivals()
            self._receive(0 if can_turn else int(HEARTBEAT_S * 1000))
            will_turn = self.loop.has_work
            if not will_turn:
                self.loop.advance()
            if will_turn and self._send(self.loop.turn()):
                silent_since = time.monotonic()
            elif time.monotonic() - silent_since >= HEARTBEAT_S:
                self._send([Heartbeat()])
                silent_since = time.monotonic()
                if not (will_turn or self._is_checked) and silent_since >= self._next_check:
                    self.loop.check()
                    self._is_checked = True
                    self._next_check = silent_since + CHECK_INTERVAL_FACTOR * (time.monotonic() - silent_since)
            self._is_checked = self._is_checked and not will_turn
            if self.events is not None:
                self.events.advance()

    def _receive_arrivals(self) -> None:
        """Takes messages while the device computes and need not be given its next step yet."""
        while wait_ms := int(1000 * self.loop.seconds_for_arrivals):
            if self.socket.poll(min(wait_ms, MAX_ARRIVALS_WAIT_MS)):
                self._receive(0)

    def _receive(self, wait_ms: int) -> None:
        """Takes all messages that have arrived, after waiting at most ``wait_ms`` for one or for copied pages."""
        if not self._has_message(wait_ms):
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

    def _has_message(self, wait_ms: int) -> bool:
        """Waits until there is something to do, at most ``wait_ms``; returns whether a message has arrived.

        Something to do is a message, a finished copy of pages, a compiled grammar, or a request of a subscriber.
        """
        descriptors = self.loop.descriptors if wait_ms else []
        replay_socket = None if self.events is None else self.events.replay_socket
        if not wait_ms or (replay_socket is None and not descriptors):
            return bool(self.socket.poll(wait_ms))
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        if self.events is not None and self.events.is_replaying:
            wait_ms = min(wait_ms, REPLAY_WAIT_MS)  # the next request of a subscriber waits no longer
        elif replay_socket is not None:
            poller.register(replay_socket, zmq.POLLIN)
        for descriptor in descriptors:
            poller.register(descriptor, zmq.POLLIN)
        return self.socket in dict(poller.poll(wait_ms))

    def _decode(self, parts: list[bytes]) -> ToRuntime | None:
        """Decodes a message; None if it is malformed, from another peer, or out of order around the handshake."""
        if len(parts) != 2:
            return None
        try:
            message = decode_to_runtime(parts[1])
        except (WireError, RequestError):
            return None
        is_hello = isinstance(message, Hello)
        return message if is_hello == (self.peer is None) and self.peer in (None, parts[0]) else None

    def _shake_hands(self, peer: bytes, hello: Hello) -> None:
        self.peer = peer
        self._send([self.loop.ready])
        if hello.version != WIRE_VERSION:
            raise WireError(
                f"the frontend speaks wire version {hello.version} and the runtime {WIRE_VERSION}; "
                "both must come from the same installation"
            )

    def _send(self, messages: list[FromRuntime]) -> bool:
        """Sends messages as one multipart message; returns whether anything was sent.

        Raises:
            WireError: the frontend is gone.
        """
        if self.peer is None or not messages:
            return False
        try:
            self.socket.send_multipart([self.peer, *map(self._encode_frame, messages)])
        except zmq.ZMQError as error:
            raise WireError(f"the frontend closed its socket: {error}") from error
        return True

    def _encode_frame(self, message: FromRuntime) -> bytes:
        if isinstance(message, Stats):
            message = msgspec.structs.replace(message, frames_dropped_total=self.frames_dropped)
        return encode(message)


if __name__ == "__main__":
    sys.exit(main())
