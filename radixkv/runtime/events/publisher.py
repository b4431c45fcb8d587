"""Publishing of numbered batches over ZeroMQ, and replays of those that a subscriber has missed."""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import zmq

from radixkv.errors import ConfigError
from radixkv.settings.kv_events import KVEventsConfig

SNAPSHOT_REQUEST = b"kv_snapshot"
"""What a subscriber sends in place of a sequence number. vLLM's requests have 8 bytes, and this one has not."""
SNAPSHOT_INTERVAL_S = 1.0
"""Shortest time between two snapshots, which stop the loop. Requests that come sooner share the next one."""
MAX_REPLAYS = 64
"""Replays in progress; requests beyond them wait in the socket."""
REPLAY_TIMEOUT_S = 30.0
"""A client that reads nothing for longer loses its replay."""
_MAX_SENDS_PER_TURN = 256
"""Batches that replays send in one turn of the loop, which bounds its length."""
REPLAY_HWM = 1000
"""Batches that wait for a client of replays to read them; more wait in the buffer itself."""
_MAX_FRAME_BYTES = 1024
"""Longest frame of a request or a subscription; the connection of a longer one is closed."""
_N_REQUEST_FRAMES = 3
"""The client's identity, an empty frame and the request."""
_MAX_FRAMES_PER_TURN = 32
"""Frames that are taken in one turn of the loop, which bounds its length whatever clients send."""
_TAKEN = (errno.EADDRINUSE, errno.EAGAIN)
"""Errors of an endpoint that a process listens on; EAGAIN: it is slow to accept connections."""
_END = (-1).to_bytes(8, "big", signed=True)
"""Sequence number of the empty batch that ends a replay."""


@dataclass(slots=True)
class _Replay:
    """What a client of the replay socket still has to get."""

    messages: deque[tuple[bytes, bytes]]
    """Sequence number and batch of each message."""
    sent_at: float


class EventPublisher:
    """Publishes batches under consecutive numbers, and keeps the last ones for replays.

    No method blocks. A subscriber that does not read loses batches beyond the high-water mark, and sees a gap in
    the numbers. A replay goes on from turn to turn as its client reads it. See docs/decisions/0046-kv-events.md.

    Args:
        config: the endpoints, which the publisher binds.
        first_number: number of the first batch.
        keep_number: called before each batch is sent, with the number after it.

    Raises:
        ConfigError: an endpoint is taken, or cannot be bound.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        first_number: int = 0,
        keep_number: Callable[[int], None] | None = None,
    ) -> None:
        self.next_number = first_number
        """Number of the next batch."""
        self._keep_number = keep_number
        self.replay_socket: zmq.Socket[bytes] | None = None
        """Readable when a replay is asked for; None without an endpoint for replays."""
        self._topic = config.topic.encode()
        self._buffer: deque[bytes] = deque(maxlen=config.buffer_steps)
        """The last batches, up to that before ``next_number``."""
        self._replays: dict[bytes, _Replay] = {}
        """By the client's identity."""
        self._frames: list[bytes] = []
        """The first frames of a message of which not all were taken."""
        self._snapshot_clients: list[bytes] = []
        """Clients that wait for the next snapshot."""
        self._next_snapshot = 0.0
        """Earliest time of the next snapshot, on ``time.monotonic``."""
        self._context = zmq.Context()
        try:
            self._publishing = self._context.socket(zmq.PUB)
            self._publishing.setsockopt(zmq.SNDHWM, config.hwm)
            self._publishing.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
            _bind(self._publishing, "endpoint", config.endpoint)
            if config.replay_endpoint is not None:
                self.replay_socket = self._context.socket(zmq.ROUTER)
                self.replay_socket.setsockopt(zmq.SNDHWM, REPLAY_HWM)
                self.replay_socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else a full client would lose messages
                self.replay_socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
                _bind(self.replay_socket, "replay_endpoint", config.replay_endpoint)
        except ConfigError:
            self.close()
            raise

    @property
    def is_replaying(self) -> bool:
        """Whether a replay or a snapshot is not sent completely: call ``serve_replays`` again soon."""
        return bool(self._replays or self._snapshot_clients)

    def publish(self, batch: bytes) -> None:
        """Publishes a batch. O(size)."""
        number = self.next_number.to_bytes(8, "big")
        self.next_number += 1
        if self._keep_number is not None:
            self._keep_number(self.next_number)  # before it is sent, so that a number never comes twice
        self._publishing.send_multipart((self._topic, number, batch), zmq.NOBLOCK)
        self._buffer.append(batch)

    def serve_replays(self, take_snapshot: Callable[[], list[bytes]]) -> None:
        """Takes requests for replays, and goes on with those in progress. O(1) if there are none.

        Args:
            take_snapshot: returns batches with all that the tiers have after the last published batch.
        """
        if self.replay_socket is None:
            return
        self._take_requests(self.replay_socket)
        if not self.is_replaying:
            return
        if self._snapshot_clients and time.monotonic() >= self._next_snapshot:
            self._begin_snapshots(take_snapshot())
        share = _MAX_SENDS_PER_TURN // max(1, len(self._replays))
        for client, replay in list(self._replays.items()):
            self._send(self.replay_socket, client, replay, share)

    def close(self) -> None:
        """Closes the sockets. What is not sent yet is lost. Call once."""
        self._context.destroy(linger=0)

    def _take_requests(self, replay_socket: zmq.Socket[bytes]) -> None:
        for _ in range(_MAX_FRAMES_PER_TURN):
            if not self._frames and len(self._replays) + len(self._snapshot_clients) >= MAX_REPLAYS:
                return
            try:
                frame = replay_socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(self._frames) <= _N_REQUEST_FRAMES:  # one more shows that the message is too long
                self._frames.append(frame)
            if not replay_socket.get(zmq.RCVMORE):
                frames, self._frames = self._frames, []
                self._take_request(frames)

    def _take_request(self, frames: list[bytes]) -> None:
        """Notes what a client asks for; ignores what is no request."""
        if len(frames) != _N_REQUEST_FRAMES or frames[1]:
            return
        client, _, request = frames
        if request == SNAPSHOT_REQUEST:
            self._forget(client)
            self._snapshot_clients.append(client)
        elif len(request) == 8:
            self._forget(client)
            self._begin_replay(client, int.from_bytes(request, "big"))

    def _forget(self, client: bytes) -> None:
        """Ends what a client has asked for before."""
        self._replays.pop(client, None)
        if client in self._snapshot_clients:
            self._snapshot_clients.remove(client)

    def _begin_replay(self, client: bytes, number: int) -> None:
        first = self.next_number - len(self._buffer)
        skipped = min(max(0, number - first), len(self._buffer))
        batches = islice(self._buffer, skipped, None)
        messages = deque((n.to_bytes(8, "big"), batch) for n, batch in enumerate(batches, first + skipped))
        messages.append((_END, b""))
        self._replays[client] = _Replay(messages, time.monotonic())

    def _begin_snapshots(self, batches: list[bytes]) -> None:
        now = time.monotonic()
        number = (self.next_number - 1).to_bytes(8, "big", signed=True)
        # Before the first batch there is nothing to send, and its number would be -1, which is ``_END``.
        messages = [(number, batch) for batch in batches if self.next_number]
        for client in self._snapshot_clients:
            self._replays[client] = _Replay(deque((*messages, (_END, b""))), now)
        self._snapshot_clients.clear()
        self._next_snapshot = now + SNAPSHOT_INTERVAL_S

    def _send(self, replay_socket: zmq.Socket[bytes], client: bytes, replay: _Replay, n_most: int) -> None:
        """Sends at most ``n_most`` messages of a replay."""
        n_sent = 0
        try:
            while n_sent < n_most and replay.messages:
                replay_socket.send_multipart((client, b"", *replay.messages[0]), zmq.NOBLOCK)
                replay.messages.popleft()
                n_sent += 1
        except zmq.Again:
            pass  # the client is behind
        except zmq.ZMQError:  # the client is gone
            replay.messages.clear()
        now = time.monotonic()
        if n_sent:
            replay.sent_at = now
        if not replay.messages or now - replay.sent_at > REPLAY_TIMEOUT_S:
            del self._replays[client]


def _bind(bound: zmq.Socket[bytes], name: str, endpoint: str) -> None:
    """Binds a socket. Raises ``ConfigError`` if the endpoint is taken or cannot be bound."""
    bound.setsockopt(zmq.LINGER, 0)
    if "[" in endpoint:
        bound.setsockopt(zmq.IPV6, 1)
    try:
        if endpoint.startswith("ipc://"):
            _check_path(endpoint.removeprefix("ipc://"))
        bound.bind(endpoint)
    except (OSError, zmq.ZMQError) as error:
        reason = "it is taken" if error.errno in _TAKEN else str(error.strerror or error)
        raise ConfigError(
            f"the {name} {endpoint} of cache events cannot be bound: {reason}; choose another in --kv-events-config"
        ) from None


def _check_path(path: str) -> None:
    """Checks the path of an ``ipc`` endpoint: ZeroMQ's bind deletes whatever has it.

    Raises:
        OSError: something has the path that is not the socket of a dead process of this user.
    """
    is_abstract = path.startswith("@")  # the socket has no file
    try:
        if not is_abstract:
            about = os.lstat(path)
            if not stat.S_ISSOCK(about.st_mode):
                raise OSError(errno.EEXIST, "a file that is no socket has this path, and is left as it is")
            if about.st_uid != os.getuid():
                raise OSError(errno.EEXIST, "another user's socket has this path")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)  # a process that is busy is no reason to wait
            probe.connect(f"\0{path[1:]}" if is_abstract else path)
        raise OSError(errno.EADDRINUSE, "")
    except (FileNotFoundError, ConnectionRefusedError):
        return
