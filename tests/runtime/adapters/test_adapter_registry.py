"""Weights of adapters are freed exactly when nothing uses them, in any order of loads, unloads and requests."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from radixkv.errors import CheckpointError, InvalidRequest
from radixkv.runtime.adapters.registry import AdapterRegistry
from radixkv.wire import messages as wire
from radixkv.wire.adapter_messages import AdapterLoaded, LoadAdapter, ServedAdapter, UnloadAdapter
from support.cases import examples
from support.fake_adapters import N_BYTES, FakeDeviceAdapters, FakeRead, fake_adapters
from support.loop_frontend import Frontend, failed

FOLDERS = {"/sql": "12ab", "/copy": "12ab", "/law": "34cd", "/math": "56ef"}
MAX_ADAPTERS = 2
NAMES = st.sampled_from("abc")


def launched(front: Frontend) -> set[str]:
    return {row.adapter for plan in front.scheduler.launched_plans for row, _ in plan.rows()}


class Adapters(RuleBasedStateMachine):
    """A loop whose requests have adapters that come and go; a model knows which weights must be there."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = fake_adapters(folders=FOLDERS, max_adapters=MAX_ADAPTERS)
        self.device = self.adapters._device
        self.front = Frontend(adapters=self.adapters)
        self.device.launched = partial(launched, self.front)
        self.loads: dict[str, ServedAdapter] = {}
        """The adapters that requests may have, by their loads."""
        self.unnamed: set[str] = set()
        """Of these loads, those that requests on their way may have."""
        self.n_loads = 0
        self.running: dict[str, str] = {}
        """The digest of each request without a terminal message."""
        self.n_requests = 0

    @property
    def digests(self) -> set[str]:
        return {adapter.digest for adapter in self.loads.values()}

    @property
    def names(self) -> set[str]:
        return {adapter.name for load, adapter in self.loads.items() if load not in self.unnamed}

    @rule(name=NAMES, path=st.sampled_from([*FOLDERS, "/nowhere"]), is_given_up=st.booleans())
    def load(self, name: str, path: str, is_given_up: bool) -> None:
        """A load may be given up while a thread reads."""
        self.n_loads += 1
        load = f"load {self.n_loads}"
        replies = self.front.loop.receive(LoadAdapter(load, name, path))
        is_refused = name not in self.names and len(self.names) == MAX_ADAPTERS
        assert bool(replies) == is_refused
        if is_given_up:
            assert self.front.loop.receive(UnloadAdapter(load)) == []
        while not replies:
            self.front.loop.wait(1.0)
            replies = [one for one in self.turn() if getattr(one, "id", None) == load]
        (reply,) = replies
        if is_refused or is_given_up or path not in FOLDERS:
            assert isinstance(reply, wire.Failed)
            return
        assert reply == AdapterLoaded(load, ServedAdapter(name, path, FOLDERS[path]))
        self.loads[load] = reply.adapter

    @rule(number=st.integers(0, 3), is_released=st.booleans())
    def unload(self, number: int, is_released: bool) -> None:
        """Without its name a load can be released later, or again."""
        for load in [*list(self.loads)[number : number + 1], "never loaded"]:
            assert self.front.loop.receive(UnloadAdapter(load, is_released)) == []
            self.unnamed.add(load)
            if is_released:
                self.loads.pop(load, None)

    @rule(digest=st.sampled_from(["", *FOLDERS.values()]), n_tokens=st.integers(1, 9))
    def request(self, digest: str, n_tokens: int) -> None:
        self.n_requests += 1
        request_id = f"r{self.n_requests}"
        self.front.submit(request_id, range(1, 14), adapter=digest, max_tokens=n_tokens, ignore_eos=True)
        is_refused = digest != "" and digest not in self.digests
        assert (self.front.received[request_id].terminal is not None) == is_refused
        if not is_refused:
            self.running[request_id] = digest

    @rule(number=st.integers(0, 3))
    def cancel(self, number: int) -> None:
        for request_id in list(self.running)[number : number + 1]:
            self.front.cancel(request_id)
            self.forget_ended()

    @rule()
    def step(self) -> None:
        self.turn()

    def turn(self) -> list[wire.FromRuntime]:
        messages = self.front.loop.turn()
        self.front.take([one for one in messages if not str(getattr(one, "id", "")).startswith("load ")])
        self.forget_ended()
        return messages

    def forget_ended(self) -> None:
        for request_id in list(self.running):
            if self.front.received[request_id].terminal is not None:
                del self.running[request_id]

    @invariant()
    def weights_are_there_as_long_as_they_are_used(self) -> None:
        assert not self.device.undecided, "memory of what was read and is not needed would never be free"
        needed = {*self.digests, *self.running.values(), *launched(self.front)} - {""}
        assert needed <= self.device.sizes.keys()
        if self.device.sizes.keys() - needed:
            assert self.front.loop.has_work, "the next turn frees the others"

    def teardown(self) -> None:
        for _ in range(300):
            if not self.front.loop.has_work:
                break
            self.turn()
        assert not self.running
        assert self.device.sizes == dict.fromkeys(self.digests, N_BYTES)
        assert self.front.stats().adapters.n_adapters == len(self.names)
        self.adapters.close()


TestAdapters = Adapters.TestCase
TestAdapters.settings = examples(150, stateful_step_count=30)


def test_a_turn_frees_what_is_not_used_any_more() -> None:
    front = Frontend(adapters=fake_adapters(ServedAdapter("sql", "/sql", "12ab")))
    sizes = front.loop.adapters._device.sizes
    front.submit("a", adapter="12ab", max_tokens=8)
    front.turn(2)
    front.loop.receive(UnloadAdapter("sql"))
    front.submit("b", adapter="12ab")
    refused = failed(front.received["b"])
    assert (refused.code, "12ab" in refused.text) == ("model_not_found", False), "clients know no digests"
    front.turn()
    assert sizes == {"12ab": N_BYTES}
    front.run()
    assert front.received["a"].finish_reasons == {0: "length"}
    assert sizes == {}


def test_a_launched_step_of_a_cancelled_request_is_computed_with_the_adapter() -> None:
    """It may write pages under the adapter's digest."""
    front = Frontend(adapters=fake_adapters(ServedAdapter("sql", "/sql", "12ab")))
    device = front.loop.adapters._device
    device.launched = partial(launched, front)
    front.submit("a", adapter="12ab", max_tokens=8)
    front.turn(2)
    assert launched(front) == {"12ab"}
    front.cancel("a")
    front.loop.receive(UnloadAdapter("sql"))
    front.turn()
    front.run()
    assert device.sizes == {}


def test_steps_go_on_while_a_folder_is_read() -> None:
    begun, may_end = threading.Event(), threading.Event()

    class SlowAdapters(FakeDeviceAdapters):
        def read(self, name: str, path: str) -> FakeRead:
            begun.set()
            may_end.wait()
            return super().read(name, path)

    adapters = fake_adapters(folders=FOLDERS, max_adapters=1)
    adapters._device = SlowAdapters(FOLDERS)
    front = Frontend(adapters=adapters)
    assert front.loop.receive(LoadAdapter("1", "sql", "/sql")) == []
    begun.wait()
    for message, text in (
        (LoadAdapter("1", "sql", "/law"), "there is a load '1' already"),
        (LoadAdapter("2", "law", "/law"), "one more than max_cpu_loras 1"),
    ):
        (refused,) = front.loop.receive(message)
        assert text in refused.text
    front.submit("a", max_tokens=3)
    for _ in range(20):
        front.turn()
    assert front.received["a"].finish_reasons == {0: "length"}
    assert front.loop.is_waiting
    may_end.set()
    front.loop.wait(5.0)
    assert front.loop.turn() == [AdapterLoaded("1", ServedAdapter("sql", "/sql", "12ab"))]
    assert not front.loop.has_work
    assert front.serve("b", adapter="12ab").finish_reasons == {0: "length"}


def test_faults_of_a_read_fail_the_load_alone() -> None:
    class BrokenAdapters(FakeDeviceAdapters):
        def read(self, name: str, path: str) -> FakeRead:
            errors = {"/memory": MemoryError("none"), "/torch": RuntimeError("x"), "/value": ValueError("z")}
            raise {**errors, "/a": CheckpointError("y")}[path]

    adapters = fake_adapters()
    adapters._device = BrokenAdapters()
    front = Frontend(adapters=adapters)
    codes = []
    for path in ("/memory", "/torch", "/value", "/a"):
        assert front.loop.receive(LoadAdapter(path, "sql", path)) == []
        front.loop.wait(5.0)
        (reply,) = front.loop.turn()
        codes.append(reply.code)
    assert codes == [*["internal_error"] * 3, "invalid_request"]


def test_what_no_turn_has_taken_is_discarded_at_the_end() -> None:
    adapters = fake_adapters(folders=FOLDERS)
    assert adapters.receive(LoadAdapter("1", "sql", "/sql")) == []
    assert adapters.receive(LoadAdapter("2", "lost", "/nowhere")) == []
    adapters.close()
    assert not adapters._device.undecided
    assert adapters._device.sizes == {}


def test_loops_without_adapters_refuse_them() -> None:
    front = Frontend()
    (refused,) = front.loop.receive(LoadAdapter("1", "sql", "/sql"))
    assert (refused.id, refused.code) == ("1", "unsupported_feature")
    assert "enable_lora" in refused.text
    assert front.loop.receive(UnloadAdapter("1")) == []
    assert front.stats().adapters is None


@pytest.mark.parametrize("is_default", [False, True])
def test_one_adapter_too_many_is_refused_with_where_the_limit_is_from(is_default: bool) -> None:
    registry = AdapterRegistry([ServedAdapter("a", "/sql", "12ab")], 1, is_default=is_default)
    limit = "max_cpu_loras 1, the default on this device" if is_default else "max_cpu_loras 1"
    with pytest.raises(InvalidRequest, match=f"one more than {limit}; unload one of 'a', or start with a higher"):
        registry.check("1", "b", [])
    registry.check("1", "a", [])


def test_a_name_without_requests_to_come_counts_no_more() -> None:
    registry = AdapterRegistry([ServedAdapter("a", "/sql", "12ab")], 1)
    registry.drop_name("a")
    registry.check("1", "b", [])
    assert registry.has("12ab")
    assert registry.names == ()


def test_equal_adapters_have_one_copy_of_the_weights() -> None:
    registry = AdapterRegistry([ServedAdapter("a", "/sql", "12ab")], 2)
    assert not registry.add("1", ServedAdapter("b", "/copy", "12ab"))
    registry.release("a")
    used = Counter[str]()
    assert registry.free(lambda digest: bool(used[digest])) == []
    registry.release("1")
    used["12ab"] += 1
    assert registry.free(lambda digest: bool(used[digest])) == []
    assert not registry.has("12ab")
    assert not registry.add("2", ServedAdapter("c", "/sql", "12ab")), "its weights are still there"
    used.clear()
    assert registry.free(lambda digest: bool(used[digest])) == []


def test_requests_may_have_an_adapter_until_it_is_released() -> None:
    """Another one of its name is loaded before."""
    front = Frontend(adapters=fake_adapters(ServedAdapter("sql", "/sql", "12ab"), folders=FOLDERS, max_adapters=1))
    assert front.loop.receive(LoadAdapter("1", "sql", "/law")) == []
    front.loop.wait(5.0)
    assert front.loop.turn() == [AdapterLoaded("1", ServedAdapter("sql", "/law", "34cd"))]
    front.loop.receive(UnloadAdapter("sql", is_released=False))
    for digest in ("12ab", "34cd"):
        assert front.serve(digest, adapter=digest).finish_reasons == {0: "length"}
    front.loop.receive(UnloadAdapter("sql"))
    front.turn()
    assert front.loop.adapters._device.sizes == {"34cd": N_BYTES}


def test_a_load_without_a_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may have no room for one more."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    front = Frontend(adapters=fake_adapters(folders=FOLDERS))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        (refused,) = front.loop.receive(LoadAdapter("1", "sql", "/sql"))
    assert "cannot be loaded now: can't start new thread" in refused.text
    assert not front.loop.has_work
    assert front.loop.receive(LoadAdapter("1", "sql", "/sql")) == []
    front.loop.wait(5.0)
    assert front.loop.turn() == [AdapterLoaded("1", ServedAdapter("sql", "/sql", "12ab"))]
