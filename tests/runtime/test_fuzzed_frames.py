"""Frames at the runtime's sockets that were changed at random: it refuses or serves each, and goes on."""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import zmq
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixkv.checkpoints import resolve
from radixkv.errors import InvalidRequest, WireError
from radixkv.runtime.events.publisher import SNAPSHOT_REQUEST, EventPublisher
from radixkv.runtime.loop import Loop
from radixkv.runtime.open_loop import build_loop
from radixkv.runtime.process import RuntimeServer
from radixkv.runtime.reporting.cache_commands import CacheCommand
from radixkv.settings.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from radixkv.settings.kv_events import KVEventsConfig
from radixkv.wire.cache_messages import CloseSession, Explain, Flush, Invalidate, Match, Outline, Pin
from radixkv.wire.messages import (
    WIRE_VERSION,
    Cancel,
    Done,
    Drain,
    Failed,
    FromRuntime,
    GetStats,
    Hello,
    PromptPin,
    Submit,
    Tokens,
    decode_from_runtime,
    decode_to_runtime,
    encode,
    pack_tokens,
)
from radixkv.wire.namespace import CacheNamespace
from radixkv.wire.sampling import SamplingParams
from radixkv.wire.table_messages import GetTables
from support.cases import examples

PROMPT = pack_tokens(range(100, 140))
PEER = b"frontend"
CANARY = Submit("canary", PROMPT, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
SAMPLING = SamplingParams(n=2, stop=("x",), seed=5, logit_bias={3: -1.5}, logprobs=2, max_tokens=4)
MESSAGES = [
    Submit(
        "a",
        PROMPT,
        SAMPLING,
        namespace=CacheNamespace(cache_salt="s"),
        pins=(PromptPin(16, 300.0),),
        session_id="s",
    ),
    Submit("b", PROMPT[:80], SamplingParams(max_tokens=3, prompt_logprobs=1), reads_cache=False),
    Cancel("a", 1),
    Hello(WIRE_VERSION),
    Flush("f"),
    CloseSession("c", "s", namespace=CacheNamespace(cache_salt="s")),
    Invalidate("i", PROMPT, namespace=CacheNamespace(cache_salt="s")),
    Explain("e", PROMPT, namespace=CacheNamespace(cache_salt="s"), contents=True),
    Outline("o", contents=True),
    Match("m", (PROMPT, PROMPT[:4]), namespace=CacheNamespace(cache_salt="s")),
    Pin("p", PROMPT, 300.0, namespace=CacheNamespace(cache_salt="s")),
    GetTables("t", ("a", "b"), 1),
    GetStats("g"),
]


class Over(Exception):
    """Nothing is left to do."""


class FrameSocket:
    """A socket on which given frames have arrived; ends the runtime when it waits for more."""

    def __init__(self, frames: list[bytes]) -> None:
        self._frames = deque(frames)
        self.sent: list[FromRuntime] = []

    def poll(self, wait_ms: int) -> int:
        if wait_ms and not self._frames:
            raise Over
        return len(self._frames)

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self._frames:
            raise zmq.Again
        return [PEER, self._frames.popleft()]

    def send_multipart(self, parts: list[bytes]) -> None:
        assert parts[0] == PEER
        self.sent += map(decode_from_runtime, parts[1:])


@pytest.fixture(scope="module")
def loop(sensitive: Path) -> Iterator[Loop]:
    config = EngineConfig(
        ModelConfig(device="cpu", max_model_len=48, grammar_backend="none"),
        CacheConfig(max_total_tokens=512),
        SchedulerConfig(max_num_seqs=8),
    )
    loop = build_loop(config, resolve(str(sensitive)))
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def canary(loop: Loop) -> bytes:
    """The tokens that the last request of each run must have."""
    return canary_tokens(run(loop, [encode(CANARY)])[1])


odd_values = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.sampled_from([0, 1, -1, 16, 64, 1 << 31, (1 << 31) - 1, -(1 << 31)])
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9)
    | st.lists(st.integers(-5, 5000), max_size=4)
)


@st.composite
def changed_frames(draw: st.DrawFn) -> bytes:
    """A frame with some bytes changed or cut off, or with some fields of its message replaced."""
    frame = encode(draw(st.sampled_from(MESSAGES)))
    kind = draw(st.sampled_from(["bytes", "fields", "random"]))
    if kind == "random":
        return draw(st.binary(max_size=100))
    if kind == "fields":
        message = msgspec.msgpack.decode(frame)
        for _ in range(draw(st.integers(1, 2))):
            fields, name = draw(st.sampled_from(list(places(message))))
            fields[name] = draw(odd_values)
        return msgspec.msgpack.encode(message)
    changed = bytearray(frame)
    for _ in range(draw(st.integers(1, 3))):
        changed[draw(st.integers(0, len(changed) - 1))] = draw(st.integers(0, 255))
    return bytes(changed[: draw(st.integers(1, len(changed)))])


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each field or item of a decoded message, however deep: what has it, and its name or index."""
    names = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for name in names:
        yield value, name
        yield from places(value[name])


def is_dropped(frame: bytes) -> bool:
    try:
        return isinstance(decode_to_runtime(frame), Hello)
    except (WireError, InvalidRequest):
        return True


def is_drain(frame: bytes) -> bool:
    try:
        return isinstance(decode_to_runtime(frame), Drain)
    except (WireError, InvalidRequest):
        return False


def run(loop: Loop, frames: list[bytes]) -> tuple[RuntimeServer, list[FromRuntime]]:
    """Gives the frames to a runtime with the loop, until nothing is left to do; returns what it sent."""
    frame_socket = FrameSocket([encode(Hello(WIRE_VERSION)), *frames])
    server = RuntimeServer(cast("zmq.Socket[bytes]", frame_socket), loop)
    with pytest.raises(Over):
        server.run()
    return server, frame_socket.sent


def canary_tokens(sent: list[FromRuntime]) -> bytes:
    items = [item for message in sent if isinstance(message, Tokens) for item in message.items]
    return b"".join(item.tokens for item in items if item.id == CANARY.id)


@examples(15)
@example(frames=[encode(CloseSession("c", "never asked"))])
@given(frames=st.lists(changed_frames(), min_size=1, max_size=8))
def test_changed_frames_are_served_or_dropped_and_counted(loop: Loop, canary: bytes, frames: list[bytes]) -> None:
    check(loop, canary, frames)


@pytest.mark.nightly
@settings(max_examples=500, derandomize=False)
@given(frames=st.lists(changed_frames(), min_size=1, max_size=8))
def test_many_changed_frames(loop: Loop, canary: bytes, frames: list[bytes]) -> None:
    check(loop, canary, frames)


def check(loop: Loop, canary: bytes, frames: list[bytes]) -> None:
    """Runs the frames, and checks what became of each and of a request after them."""
    frames = [frame for frame in frames if not is_drain(frame)]
    server, sent = run(loop, [*frames, encode(CANARY)])
    assert server.frames_dropped == sum(map(is_dropped, frames))
    assert canary_tokens(sent) == canary
    ends: Counter[Any] = Counter(message.id for message in sent if isinstance(message, Done | Failed))
    received = [decode_to_runtime(frame) for frame in frames if not is_dropped(frame)]
    submitted = {message.id for message in received if isinstance(message, Submit)} | {CANARY.id}
    commands = {message.id for message in received if isinstance(message, CacheCommand)}  # they fail, too
    assert submitted <= ends.keys() <= submitted | commands
    loop.check()
    assert not loop.has_work


@pytest.fixture(scope="module")
def publisher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventPublisher]:
    folder = tmp_path_factory.mktemp("events")
    publisher = EventPublisher(KVEventsConfig(f"ipc://{folder}/events", f"ipc://{folder}/replays", buffer_steps=3))
    for batch in BATCHES:
        publisher.publish(batch)
    yield publisher
    publisher.close()


BATCHES = [b"first", b"second", b"third", b"fourth", b"last"]
LAST = [((len(BATCHES) - 1).to_bytes(8, "big"), BATCHES[-1]), (b"\xff" * 8, b"")]
edges = [1 << 31, 1 << 32, 1 << 53, 1 << 62, 1 << 63, 1 << 64]
"""Numbers around which arithmetic of fixed widths ends; no batch has one."""
absurd_numbers = st.builds(
    lambda edge, below: (edge - below).to_bytes(8, "big"), st.sampled_from(edges), st.integers(1, 9)
)
requests = (
    st.tuples(st.just(b""), absurd_numbers)
    | st.just((b"", SNAPSHOT_REQUEST))
    | st.lists(st.binary(max_size=9), min_size=1, max_size=5)
    | st.lists(st.just(b""), min_size=1, max_size=200)
)


@examples(30)
@example(frames=[(b"", b"\xff" * 8)])
@given(frames=st.lists(requests, min_size=1, max_size=80))
def test_odd_requests_for_replays_end_nothing(publisher: EventPublisher, frames: list[list[bytes]]) -> None:
    """A client that sends absurd numbers, or no request at all, is served afterwards, and so are others."""
    endpoint = publisher.replay_socket.get(zmq.LAST_ENDPOINT)
    with zmq.Context() as context, context.socket(zmq.DEALER) as odd, context.socket(zmq.DEALER) as other:
        for client in (odd, other):
            client.setsockopt(zmq.LINGER, 0)
            client.connect(endpoint)
        for message in frames:
            odd.send_multipart(message)
        for client in (odd, other):
            client.send_multipart((b"", LAST[0][0]))
            received: list[tuple[bytes, bytes]] = []
            for left in itertools.count(-6000):
                publisher.serve_replays(lambda: [b"snapshot"])
                while client.poll(0):
                    _, number, batch = client.recv_multipart()
                    received.append((number, batch))
                if received[-2:] == LAST:
                    break
                assert left < 0, f"the replay has not come, but {received}"
                time.sleep(0.005)
