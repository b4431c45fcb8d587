"""The sockets of cache events: numbers, replays, snapshots, and subscribers that do not read."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from radixkv.errors import ConfigError
from radixkv.runtime.events import publisher as module
from radixkv.runtime.events.publisher import SNAPSHOT_REQUEST, EventPublisher
from radixkv.settings.kv_events import KVEventsConfig

LIMIT_MS = 60_000
END = (b"\xff" * 8, b"")
Open = Callable[..., EventPublisher]


@pytest.fixture
def open_publisher(tmp_path: Path) -> Iterator[Open]:
    opened: list[EventPublisher] = []

    def open_one(**settings: object) -> EventPublisher:
        config = KVEventsConfig(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays", **settings)  # type: ignore[arg-type]
        opened.append(EventPublisher(config))
        return opened[-1]

    yield open_one
    for publisher in opened:
        publisher.close()


class Client:
    """A socket of another context, as another process has it."""

    def __init__(self, kind: int, endpoint: str, **options: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(kind)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        if kind == zmq.SUB:
            self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.connect(endpoint)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)

    def ask(self, request: bytes) -> None:
        self.socket.send_multipart((b"", request))

    def receive(self) -> tuple[bytes, bytes]:
        """Returns the last two frames of the next message: number and batch."""
        assert self.socket.poll(LIMIT_MS), "nothing has come"
        *_, number, batch = self.socket.recv_multipart()
        return number, batch

    def replay(
        self, publisher: EventPublisher, snapshot: Callable[[], list[bytes]] = list
    ) -> list[tuple[bytes, bytes]]:
        """Returns all messages up to the end of a replay."""
        messages: list[tuple[bytes, bytes]] = []
        deadline = time.monotonic() + LIMIT_MS / 1000
        while END not in messages:
            assert time.monotonic() < deadline, f"no end after {len(messages)} messages"
            publisher.serve_replays(snapshot)
            while self.socket.poll(1):
                messages.append(self.receive())
        assert messages.pop() == END
        return messages


def number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def subscriber(publisher: EventPublisher, tmp_path: Path, **options: int) -> Client:
    """Returns a client that gets all batches from the next one on."""
    client = Client(zmq.SUB, f"ipc://{tmp_path}/events", **options)
    deadline = time.monotonic() + LIMIT_MS / 1000
    while not client.socket.poll(10):
        assert time.monotonic() < deadline
        publisher.publish(b"is anybody there?")
    return client


def test_batches_come_in_order_with_topic_and_number(open_publisher: Open, tmp_path: Path) -> None:
    publisher = open_publisher(topic="kv")
    with subscriber(publisher, tmp_path) as client:
        for text in (b"a", b"b", b"last"):
            publisher.publish(text)
        received = []
        while not received or received[-1][2] != b"last":
            received.append(client.socket.recv_multipart())
    numbers = [int.from_bytes(message[1], "big") for message in received]
    assert numbers == list(range(numbers[0], publisher.next_number))
    assert {message[0] for message in received} == {b"kv"}
    assert [message[2] for message in received[-3:]] == [b"a", b"b", b"last"]


def test_numbers_continue_those_of_an_earlier_publisher(tmp_path: Path) -> None:
    """A number is kept before its batch is sent: after a crash one may be missing, and none comes twice."""
    kept: list[int] = []
    config = KVEventsConfig(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays")
    publisher = EventPublisher(config, 70, kept.append)
    try:
        for text in (b"a", b"b", b"c"):
            publisher.publish(text)
        assert kept == [71, 72, 73]
        with Client(zmq.DEALER, f"ipc://{tmp_path}/replays") as client:
            for first in (0, 69, 70):
                client.ask(number(first))
                assert client.replay(publisher) == [(number(70), b"a"), (number(71), b"b"), (number(72), b"c")]
            client.ask(SNAPSHOT_REQUEST)
            assert client.replay(publisher, lambda: [b"all"]) == [(number(72), b"all")]
    finally:
        publisher.close()


def test_a_replay_has_the_batches_from_a_number_on_and_an_end(open_publisher: Open, tmp_path: Path) -> None:
    publisher = open_publisher(buffer_steps=5)
    for index in range(8):
        publisher.publish(b"%d" % index)
    with Client(zmq.DEALER, f"ipc://{tmp_path}/replays") as client:
        beyond = [(8, []), (1 << 63, []), ((1 << 64) - 1, [])]
        for first, expected in [(5, [5, 6, 7]), (7, [7]), *beyond, (0, [3, 4, 5, 6, 7])]:
            client.ask(number(first))
            assert client.replay(publisher) == [(number(n), b"%d" % n) for n in expected]


def test_a_replay_of_nothing_is_an_end(open_publisher: Open, tmp_path: Path) -> None:
    with Client(zmq.REQ, f"ipc://{tmp_path}/replays") as client:
        publisher = open_publisher()
        client.socket.send(number(0))
        deadline = time.monotonic() + LIMIT_MS / 1000
        while not client.socket.poll(1):
            assert time.monotonic() < deadline
            publisher.serve_replays(list)
        assert client.receive() == END


def test_other_requests_are_ignored(open_publisher: Open, tmp_path: Path) -> None:
    publisher = open_publisher()
    publisher.publish(b"a")
    with Client(zmq.DEALER, f"ipc://{tmp_path}/replays") as client:
        for frames in ((b"", b"1234567"), (b"",), (b"x", number(0)), (b"", b"", number(0)), (number(0),)):
            client.socket.send_multipart(frames)
        client.ask(number(0))
        assert client.replay(publisher) == [(number(0), b"a")]
        assert not client.socket.poll(0)


@pytest.mark.parametrize("name", ["events", "replays"])
def test_frames_beyond_the_limit_close_their_connection_only(
    open_publisher: Open, tmp_path: Path, name: str
) -> None:
    publisher = open_publisher()
    publisher.publish(b"a")
    with Client(zmq.DEALER if name == "replays" else zmq.XSUB, f"ipc://{tmp_path}/{name}") as long:
        monitor = long.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        long.socket.send(b"5" * (1 << 20))
        deadline = time.monotonic() + LIMIT_MS / 1000
        while not monitor.poll(5):
            assert time.monotonic() < deadline, "a frame of a megabyte was taken"
            publisher.serve_replays(list)
            publisher.publish(b"a")
        long.socket.disable_monitor()
    with Client(zmq.DEALER, f"ipc://{tmp_path}/replays") as client:
        last = number(publisher.next_number - 1)
        client.ask(last)
        assert client.replay(publisher) == [(last, b"a")]


def test_a_snapshot_has_the_number_of_the_last_batch(
    open_publisher: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SNAPSHOT_INTERVAL_S", 0.2)
    publisher, calls = open_publisher(), []

    def snapshot() -> list[bytes]:
        calls.append(publisher.next_number)
        return [b"first", b"second"]

    with Client(zmq.DEALER, f"ipc://{tmp_path}/replays") as client:
        client.ask(SNAPSHOT_REQUEST)
        assert client.replay(publisher, snapshot) == [], "nothing was published, so there is nothing"
        for index in range(3):
            publisher.publish(b"%d" % index)
        started = time.monotonic()
        client.ask(SNAPSHOT_REQUEST)
        assert client.replay(publisher, snapshot) == [(number(2), b"first"), (number(2), b"second")]
        assert len(calls) == 2
        with Client(zmq.DEALER, f"ipc://{tmp_path}/replays") as second:
            client.ask(SNAPSHOT_REQUEST)
            second.ask(SNAPSHOT_REQUEST)
            time.sleep(0.1)  # so that both requests are there
            expected = [(number(2), b"first"), (number(2), b"second")]
            assert client.replay(publisher, snapshot) == second.replay(publisher, snapshot) == expected
    assert len(calls) <= 2 + (time.monotonic() - started) / 0.2, "snapshots come too often"


def test_a_client_that_does_not_read_stops_neither_the_publisher_nor_others(
    open_publisher: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stuck subscriber sees a gap in the numbers; the stuck client of a replay gets it when it reads again."""
    monkeypatch.setattr(module, "REPLAY_HWM", 50)
    publisher = open_publisher(hwm=200)
    batch = bytes(1 << 14)
    with (
        subscriber(publisher, tmp_path, RCVHWM=10) as stuck,
        subscriber(publisher, tmp_path, RCVHWM=0) as reader,
        Client(zmq.DEALER, f"ipc://{tmp_path}/replays", RCVHWM=10) as slow,
        Client(zmq.DEALER, f"ipc://{tmp_path}/replays") as fast,
    ):
        while reader.socket.poll(100):
            reader.receive()
        first = publisher.next_number
        for index in range(800):
            publisher.publish(batch)
            assert int.from_bytes(reader.receive()[0], "big") == first + index
        slow.ask(number(first))
        for _ in range(50):
            publisher.serve_replays(list)
            time.sleep(0.002)
        assert publisher.is_replaying, "the slow client has not read"
        fast.ask(number(first + 700))
        assert len(fast.replay(publisher)) == 100
        assert [int.from_bytes(n, "big") for n, _ in slow.replay(publisher)] == list(range(first, first + 800))
        assert not publisher.is_replaying
        numbers = []
        while stuck.socket.poll(200):
            numbers.append(int.from_bytes(stuck.receive()[0], "big"))
        publisher.publish(b"after the gap")
        numbers.append(int.from_bytes(stuck.receive()[0], "big"))
    assert numbers == sorted(numbers)
    assert numbers[-1] - numbers[0] > len(numbers), "no batch was lost, so this test shows nothing"


def test_a_long_replay_holds_back_no_short_one(open_publisher: Open, tmp_path: Path) -> None:
    publisher = open_publisher(buffer_steps=20_000)
    for value in range(20_000):
        publisher.publish(number(value))
    with (
        Client(zmq.DEALER, f"ipc://{tmp_path}/replays", RCVHWM=0) as first,
        Client(zmq.DEALER, f"ipc://{tmp_path}/replays") as second,
    ):
        first.ask(number(0))
        publisher.serve_replays(list)
        while not first.socket.poll(1):
            publisher.serve_replays(list)
        second.ask(number(19_999))
        assert second.replay(publisher) == [(number(19_999), number(19_999))]
        assert publisher.is_replaying, "that of the first client is over, too"


def test_a_replay_whose_client_leaves_or_never_reads_is_given_up(
    open_publisher: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPLAY_TIMEOUT_S", 0.3)
    monkeypatch.setattr(module, "REPLAY_HWM", 10)
    publisher = open_publisher()
    for _ in range(200):
        publisher.publish(bytes(1 << 18))
    deadline = time.monotonic() + LIMIT_MS / 1000
    for leaves in (True, False):
        with Client(zmq.DEALER, f"ipc://{tmp_path}/replays", RCVHWM=1) as client:
            client.ask(number(0))
            while not publisher.is_replaying:
                publisher.serve_replays(list)
                assert time.monotonic() < deadline
            if leaves:
                client.context.destroy(linger=0)
            while publisher.is_replaying:
                publisher.serve_replays(list)
                assert time.monotonic() < deadline


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_a_taken_endpoint_is_refused(open_publisher: Open, tmp_path: Path, scheme: str) -> None:
    with Client(zmq.PUB, f"ipc://{tmp_path}/nobody") as other:
        port = other.socket.bind_to_random_port("tcp://127.0.0.1")
        open_publisher()
        taken = f"ipc://{tmp_path}/events" if scheme == "ipc" else f"tcp://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"the endpoint {taken} .* taken"):
            EventPublisher(KVEventsConfig(taken))
        with pytest.raises(ConfigError, match=f"the replay_endpoint {taken} .* taken"):
            EventPublisher(KVEventsConfig(f"ipc://{tmp_path}/a", taken))


def test_an_endpoint_of_a_killed_server_is_used_again(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{tmp_path}/left")
    EventPublisher(KVEventsConfig(f"ipc://{tmp_path}/left")).close()


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
@pytest.mark.parametrize("kind", ["file", "empty", "folder", "fifo", "link", "dangling"])
def test_another_file_in_the_place_of_an_endpoint_stays(tmp_path: Path, field: str, kind: str) -> None:
    path, precious = tmp_path / "place", tmp_path / "precious"
    precious.write_text("weights")
    if kind in ("file", "empty"):
        path.write_text("weights" if kind == "file" else "")
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(precious if kind == "link" else tmp_path / "nothing")
    before = path.lstat()
    endpoints = {"endpoint": f"ipc://{tmp_path}/events", field: f"ipc://{path}"}
    with pytest.raises(ConfigError, match=f"the {field} ipc://{path} .* choose another"):
        EventPublisher(KVEventsConfig(**endpoints))
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert precious.read_text() == "weights"
    assert kind not in ("file", "empty") or path.read_text() == ("weights" if kind == "file" else "")


@pytest.mark.parametrize("kind", ["another user's", "of datagrams", "full"])
def test_a_socket_that_is_not_of_a_dead_server_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = str(tmp_path / "socket")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM if kind == "of datagrams" else socket.SOCK_STREAM) as left,
        socket.socket(socket.AF_UNIX) as waiting,
    ):
        left.bind(path)
        if kind == "full":  # a process that listens and does not accept
            left.listen(0)
            waiting.connect(path)
        if kind == "another user's":
            monkeypatch.setattr(os, "getuid", lambda: os.stat(path).st_uid + 1)
        with pytest.raises(ConfigError, match=f"ipc://{path} .* choose another"):
            EventPublisher(KVEventsConfig(f"ipc://{path}"))
        assert Path(path).is_socket()


def test_a_taken_abstract_endpoint_is_refused(tmp_path: Path) -> None:
    name = f"@radixkv{os.getpid()}"
    first = EventPublisher(KVEventsConfig(f"ipc://{name}"))
    with pytest.raises(ConfigError, match="taken"):
        EventPublisher(KVEventsConfig(f"ipc://{tmp_path}/a", f"ipc://{name}"))
    first.close()


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be bound"):
        EventPublisher(KVEventsConfig(f"ipc://{tmp_path}/no/folder"))
