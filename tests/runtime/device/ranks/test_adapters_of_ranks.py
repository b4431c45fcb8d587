"""Adapters come and go on all ranks alike, whatever fails on one of them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from threading import Event, Thread
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from radixkv.errors import CheckpointError, DeviceError, DeviceLost
from radixkv.runtime.device.ranks.adapter_server import AdapterServer
from radixkv.runtime.device.ranks.fan_out_adapters import FanOutAdapters
from radixkv.runtime.device.ranks.frames import AdapterFrame, Frames, decode
from radixkv.runtime.device.ranks.processes import RankProcesses
from support.fake_adapters import FakeCopy, FakeDeviceAdapters, FakeRead

FOLDERS = {f"/{digest}": digest for digest in "abc"}


class Slots(FakeDeviceAdapters):
    """Adapters of a device with room for two, some of which it may fail to read."""

    def __init__(self) -> None:
        super().__init__(dict(FOLDERS), n_slots=2)
        self.error: Exception | None = None
        self.may_read = Event()
        self.may_read.set()

    def read(self, name: str, path: str) -> FakeRead:
        self.may_read.wait(10.0)
        if self.error is not None:
            raise self.error
        if len({*self.sizes, *self.undecided} - {self.folders.get(path)}) >= 2:
            raise CheckpointError("no slot is free")
        return super().read(name, path)

    def copy(self, digest: str) -> FakeCopy:
        copy, fill = super().copy(digest), FakeCopy.fill

        def fill_or_fail() -> None:
            if self.error is not None:
                raise self.error
            fill(copy)

        copy.fill = fill_or_fail  # type: ignore[method-assign]
        return copy


class Ranks:
    """Three ranks in this process: frames reach the others when they are sent, or later in the same order."""

    size = 3

    def __init__(self) -> None:
        self._stack = ExitStack()
        pairs = [socket.socketpair() for _ in range(2)]
        for one in (end for pair in pairs for end in pair):
            self._stack.enter_context(one)
        self.adapters = [Frames(ours) for ours, _ in pairs]
        self.devices = [Slots() for _ in range(3)]
        self.servers = [
            AdapterServer(device, Frames(theirs))
            for device, (_, theirs) in zip(self.devices[1:], pairs, strict=True)
        ]
        self.sent: list[AdapterFrame] = []
        self.is_lost = False
        self.fan_out = FanOutAdapters(self.devices[0], cast(RankProcesses, self))

    def send(self, frame: bytes) -> None:
        if self.is_lost:
            raise DeviceLost("gone")
        message: AdapterFrame = decode(frame, AdapterFrame)
        self.sent.append(message)
        for server in self.servers:
            server.receive(message)

    def lost(self, error: str, what: str) -> DeviceLost:
        self.is_lost = True
        return DeviceLost(f"{what}: {error}")

    @staticmethod
    def name(rank: int) -> str:
        return f"rank {rank}"

    def check(self) -> None:
        """Checks that all ranks have the same, unless they are lost."""
        if self.is_lost:
            return
        own, *others = self.devices
        assert all(device.sizes.keys() == own.sizes.keys() for device in others)
        assert all(sorted(device.undecided) == sorted(own.undecided) for device in others)
        assert all(device.in_slots == own.in_slots for device in others)
        assert all(device.n_copied == own.n_copied for device in others)

    def close(self) -> None:
        for server in self.servers:
            server.close()
        self._stack.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    try:
        yield ranks
        ranks.check()
    finally:
        ranks.close()


def test_all_ranks_have_an_adapter_once_it_is_put(ranks: Ranks) -> None:
    read = ranks.fan_out.read("sql", "/a")
    assert (read.digest, read.n_bytes) == ("a", 100)
    assert not any(device.sizes for device in ranks.devices)
    read.put()
    assert [list(device.sizes) for device in ranks.devices] == [["a"]] * 3
    assert ranks.fan_out.sizes == {"a": 100}
    ranks.fan_out.remove("a")
    assert not any(device.sizes for device in ranks.devices)
    ranks.fan_out.read("sql", "/b").discard()
    assert not any(device.undecided for device in ranks.devices)


def test_a_rank_without_a_thread_fails_the_load_alone(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(Thread, "start", start)
        with pytest.raises(DeviceError, match="rank 1: RuntimeError: can't start new thread"):
            ranks.fan_out.read("sql", "/a")
    ranks.fan_out.read("sql", "/a").put()


@pytest.mark.parametrize(
    ("error", "expected", "text"),
    [
        (
            CheckpointError("adapter 'sql': no"),
            CheckpointError,
            "rank 2 cannot load what rank 0 can: adapter 'sql'",
        ),
        (MemoryError(), DeviceError, "rank 2: MemoryError"),
        (RuntimeError("out of memory"), DeviceError, "rank 2: RuntimeError: out of memory"),
        (ValueError("not finite"), DeviceError, "rank 2: ValueError: not finite"),
    ],
)
def test_no_rank_keeps_what_one_cannot_load(
    ranks: Ranks, error: Exception, expected: type[Exception], text: str
) -> None:
    ranks.devices[2].error = error
    with pytest.raises(expected, match=text):
        Background(lambda: ranks.fan_out.read("sql", "/a")).result()
    assert not any(device.undecided for device in ranks.devices)
    ranks.devices[2].error = None
    ranks.fan_out.read("sql", "/a").put()


@pytest.mark.parametrize("error", [MemoryError("none"), ValueError("not finite")])
def test_a_copy_that_fails_on_one_rank_is_an_error(ranks: Ranks, error: Exception) -> None:
    ranks.fan_out.read("sql", "/a").put()
    copy = ranks.fan_out.copy("a")
    ranks.devices[2].error = error
    with pytest.raises(DeviceError, match=f"rank 2: {type(error).__name__}: {error}"):
        Background(copy.fill).result()
    copy.discard()


def test_what_rank_0_refuses_reaches_no_other(ranks: Ranks) -> None:
    with pytest.raises(CheckpointError, match="adapter 'sql': /nowhere has no adapter_config"):
        ranks.fan_out.read("sql", "/nowhere")
    assert ranks.sent == []


def test_other_files_on_another_rank_are_refused(ranks: Ranks) -> None:
    cast(dict[str, str], ranks.devices[1].folders)["/a"] = "other"
    with pytest.raises(CheckpointError, match="'sql': its files have changed while rank 1 read them"):
        ranks.fan_out.read("sql", "/a")
    assert not any(device.undecided for device in ranks.devices)


def test_a_rank_that_ends_while_it_reads_is_lost(ranks: Ranks) -> None:
    ranks.devices[2].may_read.clear()
    reader = Background(lambda: ranks.fan_out.read("sql", "/a"))
    ranks.adapters[1]._connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(DeviceLost, match="a load or a copy of an adapter: rank 2 has ended"):
        reader.result()
    ranks.devices[2].may_read.set()
    assert not ranks.devices[0].undecided


def test_reads_of_two_threads_take_their_own_answers(ranks: Ranks) -> None:
    cast(dict[str, str], ranks.devices[1].folders)["/b"] = "other"
    ranks.devices[2].may_read.clear()
    first = Background(lambda: ranks.fan_out.read("one", "/a"))
    second = Background(lambda: ranks.fan_out.read("two", "/b"))
    ranks.devices[2].may_read.set()
    first.result().put()
    with pytest.raises(CheckpointError, match="'two'"):
        second.result()


def test_a_copy_does_not_wait_for_a_slow_read_of_another_rank(ranks: Ranks) -> None:
    ranks.fan_out.read("one", "/a").put()
    ranks.devices[2].may_read.clear()
    reader = Background(lambda: ranks.fan_out.read("two", "/b"))
    copy = ranks.fan_out.copy("a")
    Background(copy.fill).result()
    copy.put()
    assert reader.is_running
    ranks.devices[2].may_read.set()
    reader.result().put()


def test_room_that_rank_0_frees_is_free_on_all_when_it_is_taken(ranks: Ranks) -> None:
    """Where the other ranks get frames late, in their order."""
    for digest in "ab":
        ranks.fan_out.read(digest, f"/{digest}").put()
    removed, remove = Event(), ranks.devices[0].remove

    def slow_remove(digest: str) -> None:
        remove(digest)
        removed.wait(10.0)

    ranks.devices[0].remove = slow_remove  # type: ignore[method-assign]
    removal = Background(lambda: ranks.fan_out.remove("a"))
    ranks.fan_out.read("c", "/c").put()
    removed.set()
    removal.result()
    assert [type(frame).__name__ for frame in ranks.sent[4:]] == [
        *("RankAdapterRemoved", "RankAdapterRead", "RankAdapterPut")
    ]


class Background:
    """A call in a thread, which has begun to wait or has ended."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._outcome: Any = None
        self._thread = Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()
        self._thread.join(0.2)

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._outcome = call()
        except Exception as error:
            self._outcome = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(10.0)
        assert not self._thread.is_alive()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class AdaptersOfRanks(RuleBasedStateMachine):
    """Reads that end in any way, in any order, on ranks of which some fail."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = Ranks()
        self.read: list[Any] = []
        self.copied: Any = None
        """The digest and the copy of an adapter on its way into a slot."""

    @rule(digest=st.sampled_from("abc"), failing=st.none() | st.integers(0, 2))
    def reads(self, digest: str, failing: int | None) -> None:
        if failing is not None:
            self.ranks.devices[failing].error = CheckpointError("fails")
        own = self.ranks.devices[0]
        has_room = len({*own.sizes, *own.undecided} - {digest}) < 2
        try:
            self.read.append(self.ranks.fan_out.read("name", f"/{digest}"))
            assert failing is None
            assert has_room
        except CheckpointError:
            assert failing is not None or not has_room
        for device in self.ranks.devices:
            device.error = None
        self.ranks.check()

    @rule(index=st.integers(0, 9), is_put=st.booleans())
    def ends(self, index: int, is_put: bool) -> None:
        if self.read:
            read = self.read.pop(index % len(self.read))
            if is_put and read.digest not in self.ranks.fan_out.sizes:
                read.put()
            else:
                read.discard()
        self.ranks.check()

    @rule(index=st.integers(0, 9))
    def removes(self, index: int) -> None:
        coming = set() if self.copied is None else {self.copied[0]}
        loaded = sorted(self.ranks.fan_out.sizes.keys() - self.ranks.devices[0].in_slots - coming)
        if loaded:
            self.ranks.fan_out.remove(loaded[index % len(loaded)])
        self.ranks.check()

    @rule(index=st.integers(0, 9))
    def copies(self, index: int) -> None:
        own = self.ranks.devices[0]
        waiting = sorted(own.sizes.keys() - own.in_slots)
        if waiting and self.copied is None:
            digest = waiting[index % len(waiting)]
            self.copied = digest, self.ranks.fan_out.copy(digest)
        self.ranks.check()

    @rule(failing=st.none() | st.integers(0, 2), is_put=st.booleans())
    def fills(self, failing: int | None, is_put: bool) -> None:
        if self.copied is None:
            return
        (_, copy), self.copied = self.copied, None
        if failing is not None:
            self.ranks.devices[failing].error = MemoryError()
        try:
            copy.fill()
        except (MemoryError, DeviceError):
            assert failing is not None
            is_put = False
        for device in self.ranks.devices:
            device.error = None
        if is_put and len(self.ranks.devices[0].in_slots) < 2:
            copy.put()
        else:
            copy.discard()
        self.ranks.check()

    @rule(index=st.integers(0, 9))
    def withdraws(self, index: int) -> None:
        in_slots = sorted(self.ranks.devices[0].in_slots)
        if in_slots:
            self.ranks.fan_out.withdraw(in_slots[index % len(in_slots)])
        self.ranks.check()

    def teardown(self) -> None:
        self.ranks.close()


TestAdaptersOfRanks = AdaptersOfRanks.TestCase
TestAdaptersOfRanks.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
