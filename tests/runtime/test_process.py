"""The runtime process: handshake, heartbeats, invalid frames, lock, start line and exit."""

from __future__ import annotations

import gc
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from radixkv.settings.config import EngineConfig
from radixkv.wire.messages import (
    LOCK_NAME,
    MAX_FRAME_BYTES,
    SOCKET_NAME,
    WIRE_VERSION,
    Cancel,
    Drain,
    FromRuntime,
    GetStats,
    Heartbeat,
    Hello,
    Ready,
    Start,
    Submit,
    ToRuntime,
    decode_from_runtime,
    encode,
)
from radixkv.wire.sampling import SamplingParams
from radixkv.wire.stats import Stats
from support.live import LIMIT_S, wait_for

SCRIPT = """
import gc, sys, time, types
from radixkv.wire.stats import Stats
from radixkv.wire.messages import Ready, Drain, GetStats

class Loop:
    has_work = False
    ready = Ready(1, 100, 200, 16, 10, 8, 64, "cpu", "float32")
    step = staticmethod(lambda: None)
    is_waiting = False
    descriptors = []
    launch_at = 0.0

    @property
    def seconds_for_arrivals(self):
        return max(0.0, self.launch_at - time.monotonic())

    def close(self):
        pass

    def advance(self):
        pass

    def receive(self, message):
        if isinstance(message, GetStats) and message.id == "work":
            self.has_work = True
        if isinstance(message, GetStats):
            return [Stats(message.id, n_running=int(gc.isenabled()))]
        return []

    def turn(self):
        {step}
        return []

checkpoints, loop = types.ModuleType("radixkv.checkpoints"), types.ModuleType("radixkv.runtime.open_loop")
checkpoints.resolve = lambda folder, **settings: folder

def build_loop(config, checkpoint, tokenizer_folder, **settings):
    print("libraries print")
    {build}
    return Loop()

loop.build_loop = build_loop
sys.modules |= {{"radixkv.checkpoints": checkpoints, "radixkv.runtime.open_loop": loop}}
from radixkv.runtime.process import main
sys.exit(main())
"""


class Peer:
    """A runtime process with a fake loop, and the frontend's socket to it."""

    def __init__(self, socket_path: Path, step: str = "time.sleep(0.01)", build: str = "pass") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(step=step, build=build)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._path = socket_path
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{socket_path}")

    def start(self) -> None:
        self.process.stdin.write(msgspec.json.encode(Start(EngineConfig(), "/nowhere", str(self._path))) + b"\n")
        self.process.stdin.flush()

    def send(self, message: ToRuntime) -> None:
        self._socket.send(encode(message))

    def send_frames(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def receive(self) -> FromRuntime:
        assert self._socket.poll(LIMIT_S * 1000), "no message came"
        return decode_from_runtime(self._socket.recv())

    def receive_together(self) -> list[FromRuntime]:
        assert self._socket.poll(LIMIT_S * 1000), "no message came"
        return [decode_from_runtime(frame) for frame in self._socket.recv_multipart()]

    def receive_stats(self) -> Stats:
        while not isinstance(message := self.receive(), Stats):
            assert isinstance(message, Heartbeat)
        return message

    def n_dropped(self) -> int:
        self.send(GetStats(id="g"))
        return self.receive_stats().frames_dropped_total

    def shake_hands(self) -> None:
        self.start()
        self.send(Hello(version=WIRE_VERSION))
        assert self.receive() == Ready(1, 100, 200, 16, 10, 8, 64, "cpu", "float32")

    def wait(self) -> tuple[int, str, str]:
        """Waits for the process to exit; returns exit code, standard output and standard error."""
        self.process.wait(timeout=LIMIT_S)
        return self.process.returncode, self.process.stdout.read().decode(), self.process.stderr.read().decode()

    def refusal(self) -> tuple[dict[str, str], str]:
        """Starts the process, which must exit with code 1; returns its error and standard error."""
        self.start()
        code, output, errors = self.wait()
        assert code == 1
        return json.loads(output.splitlines()[-1]), errors

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    return folder / "runtime.sock"


@pytest.fixture
def peer(socket_path: Path) -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def make(step: str = "time.sleep(0.01)", build: str = "pass") -> Peer:
        peers.append(Peer(socket_path, step, build))
        return peers[-1]

    yield make
    for each in peers:
        each.close()


def test_handshake_then_heartbeats_then_drain(peer: Callable[..., Peer]) -> None:
    runtime = peer()
    runtime.shake_hands()
    for _ in range(2):
        assert runtime.receive() == Heartbeat()
    runtime.send(Drain())
    assert runtime.wait()[:2] == (0, "")


def test_heartbeats_are_sent_while_it_works(peer: Callable[..., Peer]) -> None:
    runtime = peer()
    runtime.shake_hands()
    runtime.send(GetStats(id="work"))
    runtime.receive_stats()
    for _ in range(2):
        assert runtime.receive() == Heartbeat()


def test_messages_are_taken_until_the_next_step_must_be_launched(peer: Callable[..., Peer]) -> None:
    turn = (
        "was, self.launch_at = self.launch_at, self.launch_at or time.monotonic() + 1.0; self.has_work = not was; "
        "return [Stats('second turn' if was else 'first turn')]"
    )
    runtime = peer(turn)
    runtime.shake_hands()
    runtime.send(GetStats(id="work"))
    assert [runtime.receive_stats().id for _ in range(2)] == ["work", "first turn"]
    begun = time.monotonic()
    for id_ in ("a", "b"):
        runtime.send(GetStats(id=id_))
        assert runtime.receive_stats().id == id_
    assert runtime.receive_stats().id == "second turn"
    assert time.monotonic() - begun >= 0.9


def test_the_wait_for_messages_ends_when_the_device_is_done_early(peer: Callable[..., Peer]) -> None:
    """The forecast falls from an hour to 0 without a message."""
    turn = (
        "was, self.launch_at = self.launch_at, time.monotonic() + 0.2; self.has_work = not was; "
        "done = self.launch_at; "
        "type(self).seconds_for_arrivals = property(lambda self: 3600.0 if time.monotonic() < done else 0.0); "
        "return [Stats('second turn' if was else 'first turn')]"
    )
    runtime = peer(turn)
    runtime.shake_hands()
    runtime.send(GetStats(id="work"))
    assert [runtime.receive_stats().id for _ in range(3)] == ["work", "first turn", "second turn"]


def test_garbage_collection_is_disabled_in_the_loop(peer: Callable[..., Peer]) -> None:
    assert gc.isenabled()
    runtime = peer()
    runtime.shake_hands()
    runtime.send(GetStats(id="g"))
    assert runtime.receive_stats().n_running == 0


def test_another_version_is_fatal_on_both_sides(peer: Callable[..., Peer]) -> None:
    runtime = peer()
    runtime.start()
    runtime.send(Hello(version=WIRE_VERSION + 1))
    ready = runtime.receive()
    assert isinstance(ready, Ready)
    assert ready.version == 1
    code, output, errors = runtime.wait()
    assert code == 1
    fatal = json.loads(output.splitlines()[-1])
    assert fatal["kind"] == "WireError"
    assert f"version {WIRE_VERSION + 1}" in fatal["text"]
    assert f"runtime {WIRE_VERSION};" in fatal["text"]
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    "build",
    ["raise MemoryError('12 GB')", "raise RuntimeError('DefaultCPUAllocator: can\\'t allocate memory: 12 GB')"],
)
def test_too_little_memory_is_reported_without_a_traceback(peer: Callable[..., Peer], build: str) -> None:
    fatal, errors = peer(build=build).refusal()
    assert fatal["kind"] == "ConfigError"
    assert "12 GB" in fatal["text"]
    assert "--kv-cache-memory-bytes" in fatal["text"]
    assert "Traceback" not in errors


def test_an_unexpected_error_at_the_start_has_its_traceback(peer: Callable[..., Peer]) -> None:
    fatal, errors = peer(build="raise RuntimeError('shapes do not match')").refusal()
    assert fatal["text"] == "RuntimeError: shapes do not match"
    assert "Traceback" in errors


def test_all_frames_of_a_turn_are_one_message(peer: Callable[..., Peer]) -> None:
    both = "Stats('a'), Ready(*[1] * 7, 'cpu', 'float32')"
    runtime = peer(f"self.has_work = False; return [{both}]")
    runtime.shake_hands()
    runtime.send(GetStats(id="work"))
    together: list[FromRuntime] = []
    while len(together) < 2:
        together = runtime.receive_together()
    assert isinstance(together[0], Stats)
    assert together[1] == Ready(1, 1, 1, 1, 1, 1, 1, "cpu", "float32")


def test_garbage_is_dropped_and_counted(peer: Callable[..., Peer]) -> None:
    runtime = peer()
    runtime.start()
    runtime.send_frames(b"garbage before the handshake")
    runtime.send(Cancel(id="before the handshake"))
    runtime.send(Hello(version=WIRE_VERSION))
    assert isinstance(runtime.receive(), Ready)
    runtime.send(Hello(version=WIRE_VERSION))
    runtime.send_frames(b"")
    runtime.send_frames(b"\xff" * 100)
    runtime.send_frames(b"two", b"frames")
    runtime.send_frames(b"\x91" * 100_000)
    submit = Submit(id="a", tokens=bytes(4), sampling=SamplingParams(temperature=0.5))
    runtime.send_frames(encode(submit).replace(struct.pack(">d", 0.5), struct.pack(">d", -0.5)))
    assert runtime.n_dropped() == 8


def test_messages_of_a_second_peer_are_dropped(peer: Callable[..., Peer], socket_path: Path) -> None:
    runtime = peer()
    runtime.shake_hands()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"ipc://{socket_path}")
        for message in (Hello(version=WIRE_VERSION), Drain(), GetStats(id="x")):
            stranger.send(encode(message))
        stranger.send(b"x" * (MAX_FRAME_BYTES + 1))
        wait_for(lambda: runtime.n_dropped() == 3, "the dropped frames are not counted")
        assert not stranger.poll(500)
    assert runtime.n_dropped() == 3
    assert runtime.process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_and_sigint_are_ignored(peer: Callable[..., Peer], number: signal.Signals) -> None:
    runtime = peer()
    runtime.shake_hands()
    runtime.process.send_signal(number)
    runtime.send(GetStats(id="g"))
    runtime.receive_stats()


@pytest.mark.parametrize("step", ["time.sleep(3600)", "while True: pass"])
def test_it_exits_with_the_frontend_even_during_a_long_step(
    peer: Callable[..., Peer], socket_path: Path, step: str
) -> None:
    runtime = peer(step)
    runtime.shake_hands()
    runtime.send(GetStats(id="work"))
    runtime.receive_stats()
    time.sleep(0.1)
    runtime.process.stdin.close()
    runtime.process.wait(timeout=LIMIT_S)
    assert not socket_path.parent.exists()


def test_a_second_runtime_on_the_same_path_refuses(peer: Callable[..., Peer], socket_path: Path) -> None:
    first, second = peer(), peer()
    first.shake_hands()
    lock, number = socket_path.parent / LOCK_NAME, (7).to_bytes(8, "big")
    lock.write_bytes(number)
    fatal, errors = second.refusal()
    assert fatal["kind"] == "ConfigError"
    assert "another runtime already serves" in fatal["text"]
    assert "Traceback" not in errors
    assert lock.read_bytes() == number, "the number of the first one's next batch of events"
    first.send(GetStats(id="g"))
    first.receive_stats()


def test_the_lock_of_a_dead_runtime_is_free(peer: Callable[..., Peer], socket_path: Path) -> None:
    first = peer()
    first.shake_hands()
    first.process.kill()
    first.process.wait()
    assert (socket_path.parent / LOCK_NAME).exists()
    peer().shake_hands()


def test_a_folder_that_is_open_to_others_is_refused(peer: Callable[..., Peer], socket_path: Path) -> None:
    os.chmod(socket_path.parent, 0o755)
    assert "open to other users" in peer().refusal()[0]["text"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [(SOCKET_NAME, "link"), (SOCKET_NAME, "file"), (LOCK_NAME, "link"), (LOCK_NAME, "folder"), (LOCK_NAME, "file")],
)
def test_another_file_in_the_place_of_socket_or_lock_stays(
    peer: Callable[..., Peer], socket_path: Path, tmp_path: Path, name: str, kind: str
) -> None:
    precious, place = tmp_path / "precious", socket_path.parent / name
    content = "my diary, year one"  # longer than what a runtime writes into its lock
    precious.write_text(content)
    if kind == "link":
        place.symlink_to(precious)
    elif kind == "folder":
        place.mkdir()
    else:
        place.write_text(content)
    assert "another file" in peer().refusal()[0]["text"]
    assert place.is_symlink() == (kind == "link")
    assert place.is_dir() or place.read_text() == precious.read_text() == content


@pytest.mark.parametrize("line", [b"", b"{}\n", b"garbage\n", b'{"engine": {"cache": {"page_size": 0}}}\n'])
def test_an_invalid_start_line_is_refused(peer: Callable[..., Peer], line: bytes) -> None:
    runtime = peer()
    runtime.process.stdin.write(line)
    runtime.process.stdin.close()
    code, output, errors = runtime.wait()
    assert code == 1
    assert json.loads(output.splitlines()[-1])["kind"] in ("WireError", "ConfigError")
    assert "Traceback" not in errors
