"""The messages of the wire: encoding, decoding and validation."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.errors import CheckpointError, ConfigError, InvalidRequest, RadixKVError, WireError
from radixkv.settings.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from radixkv.wire.cache_messages import (
    CloseSession,
    Explain,
    Explained,
    Flush,
    Flushed,
    GetStored,
    Invalidate,
    Invalidated,
    Match,
    Matched,
    Outline,
    Outlined,
    Pin,
    Pinned,
    SessionClosed,
    Stored,
    TierMatch,
    TierOutline,
    TreeNode,
)
from radixkv.wire.cache_use import CacheUse
from radixkv.wire.messages import (
    MAX_FRAME_BYTES,
    Cancel,
    ComputedPrompt,
    Done,
    DraftUse,
    Drain,
    Failed,
    Fatal,
    FromRuntime,
    GetStats,
    Heartbeat,
    Hello,
    NewTokens,
    PromptLogprobs,
    PromptPin,
    Ready,
    Start,
    Submit,
    TokenLogprobs,
    Tokens,
    ToRuntime,
    decode_from_runtime,
    decode_to_runtime,
    encode,
    pack_tokens,
    unpack_tokens,
)
from radixkv.wire.namespace import CacheNamespace
from radixkv.wire.sampling import SamplingParams
from radixkv.wire.stats import Stats
from radixkv.wire.table_messages import ChoiceTable, GetTables, PoolUse, RequestTables, Tabled, TablePage
from support.cases import examples

TO_RUNTIME: list[ToRuntime] = [
    Hello(version=1),
    Submit(
        id="a",
        tokens=b"\1\0\0\0",
        sampling=SamplingParams(n=2, stop=("x",), seed=5, logit_bias={3: -1.5}, logprobs=2, prompt_logprobs=0),
        namespace=CacheNamespace(cache_salt="s"),
        priority=-7,
        pins=(PromptPin(1, 300.0),),
    ),
    Cancel(id="a"),
    Cancel(id="a", choice=1),
    Flush(id="f"),
    CloseSession(id="c", session_id="s", namespace=CacheNamespace(cache_salt="x")),
    Invalidate(id="i", tokens=b"\1\0\0\0", namespace=CacheNamespace(cache_salt="s")),
    Explain(id="e", tokens=b"\1\0\0\0", namespace=CacheNamespace(cache_salt="s"), contents=False),
    Outline(id="o", contents=False),
    GetStored(id="s", tokens=b"\1\0\0\0", namespace=CacheNamespace(cache_salt="s")),
    Match(id="m", prompts=(b"\1\0\0\0", b"\2\0\0\0"), namespace=CacheNamespace(cache_salt="s")),
    Pin(id="p", tokens=b"\1\0\0\0", ttl_s=300.0, namespace=CacheNamespace(cache_salt="s")),
    GetTables(id="t", requests=("a", "b"), first=4),
    GetStats(id="g"),
    Drain(),
]
FROM_RUNTIME: list[FromRuntime] = [
    Ready(1, 100, 200, 16, 10, 8, 64, "cpu", "float32"),
    Tokens([NewTokens("a", b"\1\0\0\0"), NewTokens("b", b"")]),
    Tokens(
        [NewTokens("a", b"\1\0\0\0", 1, "stop", 1, [TokenLogprobs(-0.5, 1, b"\1\0\0\0", b"\0\0\0\xbf")])],
        [PromptLogprobs("a", 1, [TokenLogprobs(-2.0, 3, b"", b"")])],
        [ComputedPrompt("a", CacheUse(32, 5, n_added=16))],
    ),
    Done("a", "stop", 3, 4, CacheUse(2, 1, 1, 1), 0.5),
    Done("a", "stop", 3, 4, CacheUse(), 0.5, drafts=DraftUse(2, 1)),
    Failed("a", "queue_full", "the queue is full", None),
    Flushed("f", 1, 2),
    Invalidated("i", 3, 1, 4, None),
    SessionClosed("c", 3, None),
    Explained("e", 40, 32, "differs", 35, 7, 8),
    Explained("e", 40, 0, "other_namespace", n_cached_elsewhere=32),
    Outlined(
        "o", TierOutline((TreeNode(7, -1, 0, 9, 1, 0, None, True, 2, 3, "1f", b"\1\0\0\0"),), 12, 3, 1, 2), None
    ),
    Matched("m", (TierMatch(40, 16, 16, 0), TierMatch(1, 0, 0, 0)), 3, 2, 10, 5),
    Stored("s", 32, 16, True),
    Pinned("p", 40, 32, 299.5),
    Tabled(
        "t",
        PoolUse(64, 32, 2, 1, 28, 0, 1),
        (
            RequestTables(
                "a",
                "search",
                (
                    ChoiceTable(
                        0, "running", 20, 21, 21, 1, 1, 0, pages=(TablePage(0, 7, 16, "tree", 2, "device"),)
                    ),
                ),
            ),
        ),
        n_more=3,
    ),
    Stats("g", *range(1, 8), CacheUse(5, 4, 3, 2, 1), *range(9, 14), 0.5, 0.25, 3, 2),
    Heartbeat(),
]


@pytest.mark.parametrize("message", TO_RUNTIME, ids=lambda m: type(m).__name__)
def test_round_trip_to_the_runtime(message: ToRuntime) -> None:
    assert decode_to_runtime(encode(message)) == message


@pytest.mark.parametrize("message", FROM_RUNTIME, ids=lambda m: type(m).__name__)
def test_round_trip_from_the_runtime(message: FromRuntime) -> None:
    assert decode_from_runtime(encode(message)) == message


def test_a_message_of_the_other_direction_is_refused() -> None:
    for message in FROM_RUNTIME:
        with pytest.raises(WireError):
            decode_to_runtime(encode(message))
    for message in TO_RUNTIME:
        with pytest.raises(WireError):
            decode_from_runtime(encode(message))


@examples(300)
@given(st.binary(max_size=200))
def test_garbage_is_a_wire_error(frame: bytes) -> None:
    for decode in (decode_to_runtime, decode_from_runtime):
        with pytest.raises(WireError):
            decode(frame)


@examples(300)
@given(st.data())
def test_a_damaged_frame_is_a_message_or_refused(data: st.DataObject) -> None:
    frame = bytearray(encode(data.draw(st.sampled_from(TO_RUNTIME))))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = frame[: data.draw(st.integers(1, len(frame)))]
    try:
        message = decode_to_runtime(bytes(cut))
    except (WireError, InvalidRequest):
        return
    assert isinstance(message, ToRuntime)


def test_frames_that_would_exhaust_memory_or_the_stack_are_refused() -> None:
    deep = b"\x91" * 100_000 + b"\xc0"
    field = msgspec.msgpack.encode({"type": "Cancel", "id": "a"})[:-2]
    for frame in (deep, b"\x81\xa1x" + deep, field + b"\xa1\xff", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        with pytest.raises(WireError):
            decode_to_runtime(frame)
    with pytest.raises(WireError, match="at most"):
        decode_to_runtime(b" " * (MAX_FRAME_BYTES + 1))


def test_sampling_is_validated_again_on_arrival() -> None:
    raw = msgspec.msgpack.decode(encode(TO_RUNTIME[1]))
    raw["sampling"]["temperature"] = float("nan")
    with pytest.raises(InvalidRequest, match="temperature"):
        decode_to_runtime(msgspec.msgpack.encode(raw))


def test_start_has_every_setting_and_validates_it() -> None:
    engine = EngineConfig(
        ModelConfig("m", "r", dtype="float32", max_model_len=77),
        CacheConfig(4, 1 << 20, 99, enable_prefix_caching=False),
        SchedulerConfig(8, 64, "fcfs", max_queued_requests=5),
        3,
    )
    start = Start(engine, "/folder", "/folder/socket")
    assert msgspec.json.decode(msgspec.json.encode(start), type=Start) == start
    bad = msgspec.json.encode(start).replace(b'"page_size":4', b'"page_size":0')
    with pytest.raises(ConfigError, match="page_size 0"):
        msgspec.json.decode(bad, type=Start)


def test_fatal_becomes_the_error_that_it_names() -> None:
    assert type(Fatal("CheckpointError", "x").error()) is CheckpointError
    assert type(Fatal("ConfigError", "x").error()) is ConfigError
    assert type(Fatal("MemoryError", "x").error()) is RadixKVError


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=20))
def test_tokens_are_little_endian_int32(ids: list[int]) -> None:
    packed = pack_tokens(ids)
    assert packed == b"".join(i.to_bytes(4, "little", signed=True) for i in ids)
    assert unpack_tokens(packed) == ids


def test_a_token_outside_int32_is_an_error() -> None:
    with pytest.raises(OverflowError):
        pack_tokens([1 << 31])
