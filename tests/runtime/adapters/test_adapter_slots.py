"""With fewer slots than adapters, requests wait for their adapter's turn: no step has more, and nobody starves."""

from __future__ import annotations

import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixkv.errors import DeviceLost
from radixkv.runtime.adapters.slot_queue import TURN_S
from radixkv.runtime.finished import wait_readable
from radixkv.settings.tenants import TenantConfig
from radixkv.wire.adapter_messages import LoadAdapter, UnloadAdapter
from support.cases import examples
from support.fake_adapters import FakeCopy
from support.loop_frontend import Frontend, done, failed
from support.slot_frontend import DIGESTS, STEP_S, SlotFrontend

TENANTS = (TenantConfig("one", cache_salt="request"), TenantConfig("two", cache_salt="request"))


@given(
    n_slots=st.integers(1, 3),
    n_rare=st.integers(1, 3),
    priorities=st.tuples(*[st.integers(0, 1)] * 6),
    lengths=st.lists(st.integers(1, 10), min_size=1),
    rare=st.sets(st.integers(0, 79), min_size=1, max_size=12),
)
@examples(12)
def test_nobody_waits_for_more_than_a_turn_of_each_adapter(
    n_slots: int, n_rare: int, priorities: tuple[int, ...], lengths: list[int], rare: set[int]
) -> None:
    """Requests of as many adapters as there are slots never end, and in some turns one of another adapter comes."""
    digests = [f"{number:02d}" for number in range(n_slots + n_rare)]
    front = SlotFrontend(n_slots, digests, n_pages=8192, max_num_seqs=512, max_num_batched_tokens=8192)
    longest_s = (10 + 3) * STEP_S  # a step for each token and the prompt, and those that are launched ahead
    began: dict[str, float] = {}
    waited: list[float] = []

    def turn() -> None:
        front.turn()
        for name in [name for name in began if front.tokens(name)]:
            waited.append(front.now - began.pop(name))

    for number in range(80):
        numbers = [*range(n_slots), *([n_slots + number % n_rare] if number in rare else [])]
        for adapter in numbers:
            name = f"{adapter}-{number}"
            began[name] = front.now
            front.submit(
                name,
                [1, 2, 3],
                adapter=digests[adapter],
                priority=priorities[adapter],
                max_tokens=lengths[(number + adapter) % len(lengths)],
                ignore_eos=True,
            )
        turn()
    while front.loop.has_work:
        turn()
    assert not began
    assert max(waited) <= len(digests) * (TURN_S + longest_s + 2 * STEP_S)
    front.adapters.close()


@pytest.mark.parametrize("tenant", ["", "one"])
def test_a_stream_of_requests_starves_no_other_adapter(tenant: str) -> None:
    """The slot closes after a turn: what runs in it ends, and later requests wait for the other adapter's turn."""
    front = SlotFrontend(1, tenants=TENANTS if tenant else ())
    waited_s: float | None = None
    for number in range(100):
        front.submit(f"sql{number}", adapter="12ab", max_tokens=5, ignore_eos=True, tenant=tenant)
        if number == 20:
            front.submit("law", adapter="34cd", max_tokens=5, ignore_eos=True, tenant=tenant)
            began = front.now
        front.turn()
        if number >= 20 and front.tokens("law"):
            waited_s = front.now - began
            break
    assert waited_s is not None
    assert waited_s <= TURN_S + 10 * STEP_S
    front.run()
    assert all(done(received).n_output_tokens == 5 for received in front.received.values())
    front.adapters.close()


def test_no_priority_makes_another_adapter_wait_for_ever() -> None:
    front = SlotFrontend(1)
    front.submit("low", adapter="12ab", priority=1, max_tokens=2)
    while not front.tokens("low"):
        for digest in ("34cd", "56ef"):
            front.submit(f"{digest} {front.now}", adapter=digest, max_tokens=2, ignore_eos=True)
        front.turn()
        assert front.now < 4 * (TURN_S + 5 * STEP_S)
    front.run()
    front.adapters.close()


def test_requests_without_a_slot_hold_nobody_back() -> None:
    """Also more of them than the queue ranks."""
    front = SlotFrontend(1, n_pages=2048, lpm_window=4)
    front.submit("long", adapter="12ab", max_tokens=60, ignore_eos=True)
    front.turn(3)
    for number in range(12):
        front.submit(f"law{number}", adapter="34cd", max_tokens=2)
    front.submit("sql", adapter="12ab", max_tokens=2)
    front.submit("plain", max_tokens=2)
    assert front.stats().n_waiting == 14
    assert front.stats().adapters.n_waiting == 12
    front.turn(4)
    assert front.received["sql"].terminal is not None
    assert front.received["plain"].terminal is not None
    assert not any(front.tokens(f"law{number}") for number in range(12))
    front.run()
    stats = front.stats().adapters
    assert (stats.n_adapters, stats.n_in_slots, stats.slot_loads_total, stats.n_waiting) == (4, 1, 2, 0)
    front.adapters.close()


def test_the_slot_of_least_recent_use_is_taken() -> None:
    front = SlotFrontend(2)
    for digest in ("12ab", "34cd", "12ab", "56ef"):
        front.serve(f"{front.now}", adapter=digest)
    assert front.adapters_device.in_slots == {"12ab", "56ef"}
    front.adapters.close()


def test_the_next_adapter_is_copied_while_all_slots_are_in_use() -> None:
    front = SlotFrontend(1)
    front.submit("sql", adapter="12ab", max_tokens=20, ignore_eos=True)
    front.turn(3)
    front.submit("law", adapter="34cd", max_tokens=2)
    front.turn(3)
    assert front.slots.is_coming("34cd")
    assert front.adapters_device.n_copied == 1
    front.cancel("law")
    front.turn()
    assert not front.slots.is_coming("34cd"), "nobody waits for it any more"
    assert front.adapters_device.n_copied == 0
    front.submit("law2", adapter="34cd", max_tokens=2)
    front.run()
    assert front.tokens("law2")
    front.adapters.close()


def test_an_unloaded_adapter_gets_its_turn_for_requests_that_wait() -> None:
    front = SlotFrontend(1)
    front.submit("sql", adapter="12ab", max_tokens=10, ignore_eos=True)
    front.turn(3)
    front.submit("law", adapter="34cd", max_tokens=3, ignore_eos=True)
    front.loop.receive(UnloadAdapter("34cd"))
    front.turn(2)
    assert "34cd" in front.adapters_device.sizes
    front.run()
    assert len(front.tokens("law")) == 3
    assert "34cd" not in front.adapters_device.sizes
    assert front.adapters_device.in_slots == set()
    front.adapters.close()


def test_requests_in_line_count_in_the_limits_of_the_queue() -> None:
    front = SlotFrontend(1, max_queued_requests=2, queue_timeout_s=2.0)
    front.submit("sql", adapter="12ab", max_tokens=60, ignore_eos=True)
    front.turn(3)
    for name in ("a", "b", "c"):
        front.submit(name, adapter="34cd")
    assert failed(front.received["c"]).code == "queue_full"
    front.now += 2.5
    front.turn()
    assert [failed(front.received[name]).code for name in ("a", "b")] == ["queue_timeout", "queue_timeout"]
    front.run()
    front.adapters.close()


def test_tenants_see_their_requests_in_line() -> None:
    front = SlotFrontend(1, tenants=TENANTS)
    front.submit("sql", adapter="12ab", max_tokens=30, ignore_eos=True, tenant="one")
    front.turn(3)
    front.submit("law", adapter="34cd", tenant="two")
    tenants = front.stats().tenants
    assert [(tenants[name].n_running, tenants[name].n_waiting) for name in ("one", "two")] == [(1, 0), (0, 1)]
    front.run()
    front.adapters.close()


def test_a_closed_slot_does_not_go_on_with_requests_that_were_queued() -> None:
    """Those that have not begun return to line, however many they are."""
    front = SlotFrontend(1, n_pages=2048, max_num_seqs=2)
    for number in range(60):
        front.submit(f"sql{number}", adapter="12ab", max_tokens=10, ignore_eos=True)
    front.turn()
    front.submit("law", adapter="34cd", max_tokens=2, ignore_eos=True)
    began = front.now
    while not front.tokens("law"):
        front.turn()
        assert front.now - began <= TURN_S + 15 * STEP_S
    front.run()
    assert all(done(received).n_output_tokens for received in front.received.values())
    front.adapters.close()


def test_a_slot_is_in_use_until_no_launched_step_has_its_rows() -> None:
    """Its last request is cancelled while a step is launched, and the next adapter has been copied."""
    front = SlotFrontend(1)
    front.submit("sql", adapter="12ab", max_tokens=30, ignore_eos=True)
    front.turn(3)
    front.submit("law", adapter="34cd", max_tokens=2, ignore_eos=True)
    front.turn(2)
    wait_readable([front.slots.fileno()], 0.0)
    assert front.slots.is_coming("34cd")
    assert front.launched() == {"12ab"}
    front.cancel("sql")
    front.slots.advance()
    front.check_slots()
    assert front.adapters_device.in_slots == {"12ab"}
    front.run()
    assert len(front.tokens("law")) == 2
    front.adapters.close()


def test_a_request_that_has_begun_goes_on_after_its_slot_is_closed() -> None:
    """A preemption, as after a failed step, does not put it in line behind the adapter that waits for it."""
    front = SlotFrontend(1)
    front.submit("sql", adapter="12ab", max_tokens=60, ignore_eos=True)
    front.turn(3)
    front.submit("law", adapter="34cd", max_tokens=2, ignore_eos=True)
    front.now += 2 * TURN_S
    front.turn()
    assert front.slots.queue._slots["12ab"].is_closed
    front.device.fail_steps.add(front.stats().steps_total)
    front.run()
    assert [len(front.tokens(name)) for name in ("sql", "law")] == [60, 2]
    assert front.slots.n_loads == 2, "each adapter had one turn"
    front.adapters.close()


def test_an_adapter_keeps_its_slot_for_a_turn() -> None:
    """Also while another one waits that has waited for a turn already."""
    front = SlotFrontend(1)
    front.submit("sql", adapter="12ab", max_tokens=30, ignore_eos=True)
    front.turn(3)
    for digest in ("34cd", "56ef"):
        front.submit(digest, adapter=digest, max_tokens=3, ignore_eos=True)
    while "34cd" not in front.adapters_device.in_slots:
        front.turn()
    began = front.now
    assert front.slots.queue._is_over(front.slots.queue._lines["56ef"].since)
    number = 0
    while "34cd" in front.adapters_device.in_slots:
        assert front.now - began >= TURN_S or not front.slots.queue._slots["34cd"].is_closed
        front.submit(f"law{number}", adapter="34cd", max_tokens=3, ignore_eos=True)
        front.turn()
        number += 1
    assert front.now - began >= TURN_S
    front.run()
    front.adapters.close()


def test_a_copy_without_a_thread_loses_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    front = SlotFrontend(1)
    front.submit("sql", adapter="12ab")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(DeviceLost, match="could not be copied: can't start new thread"):
            front.turn()
    front.adapters.close()


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), MemoryError("none"), ValueError("not finite")])
def test_a_copy_that_fails_loses_the_device(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self: FakeCopy) -> None:
        raise error

    monkeypatch.setattr(FakeCopy, "fill", fill)
    front = SlotFrontend(1)
    front.submit("sql", adapter="12ab")
    with pytest.raises(DeviceLost, match=f"could not be copied: {type(error).__name__}"):
        front.turn(3)
    front.adapters.close()


def test_steps_go_on_while_an_adapter_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(FakeCopy, "fill", lambda self: may_end.wait() and setattr(self, "is_filled", True))
    front = SlotFrontend(1)
    front.submit("sql", adapter="12ab", max_tokens=3)
    front.submit("plain", max_tokens=3)
    for _ in range(10):
        Frontend.turn(front)
    assert done(front.received["plain"]).n_output_tokens == 3
    assert front.loop.is_waiting
    may_end.set()
    front.loop.wait(10.0)
    front.run()
    assert done(front.received["sql"]).n_output_tokens == 3
    front.adapters.close()


class Slots(RuleBasedStateMachine):
    """Requests with and without adapters, in a pool that is too small for all of them, in any order."""

    @initialize(n_slots=st.integers(1, 3), has_tenants=st.booleans(), policy=st.sampled_from(["fcfs", "lpm"]))
    def begin(self, n_slots: int, has_tenants: bool, policy: str) -> None:
        self.caught_before = sys.exc_info()[1]
        self.has_tenants = has_tenants
        self.front = SlotFrontend(
            n_slots,
            n_pages=20,
            max_num_seqs=4,
            num_reserved_decode_tokens=0,
            tenants=TENANTS if has_tenants else (),
            schedule_policy=policy,
            queue_timeout_s=8.0,
        )

    @rule(
        digest=st.sampled_from(["", *DIGESTS]),
        n_prompt=st.integers(1, 30),
        n=st.integers(1, 2),
        n_tokens=st.integers(1, 20),
        priority=st.integers(0, 1),
        is_beam_search=st.booleans(),
        tenant=st.sampled_from(["one", "two"]),
    )
    def request(
        self, digest: str, n_prompt: int, n: int, n_tokens: int, priority: int, is_beam_search: bool, tenant: str
    ) -> None:
        sampling = {"use_beam_search": True, "n": 2} if is_beam_search else {"n": n, "ignore_eos": True}
        sender = {"tenant": tenant} if self.has_tenants else {"priority": priority}
        name = f"r{len(self.front.received)}"
        self.front.submit(name, range(1, n_prompt + 1), adapter=digest, max_tokens=n_tokens, **sender, **sampling)

    @precondition(lambda self: self.front.received)
    @rule(which=st.integers(0, 20), choice=st.sampled_from([None, 0, 1]))
    def cancel(self, which: int, choice: int | None) -> None:
        self.front.cancel(f"r{which % len(self.front.received)}", choice)

    @rule()
    def fail(self) -> None:
        """The next launched step will fail."""
        self.front.device.fail_steps.add(self.front.stats().steps_total)

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.front.now += seconds

    @rule(n_turns=st.integers(1, 12))
    def turn(self, n_turns: int) -> None:
        self.front.turn(n_turns)

    @rule(digest=st.sampled_from(DIGESTS))
    def reload(self, digest: str) -> None:
        """The files are unloaded, perhaps while requests use them, and soon loaded again."""
        self.front.loop.receive(UnloadAdapter(digest))
        self.front.loop.receive(LoadAdapter(digest, digest, digest))
        while self.front.adapters._loading:
            self.front.loop.wait(10.0)
            self.front.turn()

    @invariant()
    def slots_are_consistent(self) -> None:
        if hasattr(self, "front"):
            self.front.check_slots()

    def teardown(self) -> None:
        """All requests end, and the weights of unloaded adapters are freed."""
        if not hasattr(self, "front") or sys.exc_info()[1] is not self.caught_before:
            return
        self.front.device.fail_steps.clear()
        self.front.run()
        assert all(received.terminal is not None for received in self.front.received.values())
        assert self.front.stats().n_waiting == 0
        for digest in DIGESTS:
            self.front.loop.receive(UnloadAdapter(digest))
        self.front.run()
        device = self.front.adapters_device
        assert not device.in_slots
        assert not device.sizes
        assert not device.n_copied
        self.front.adapters.close()


TestSlots = Slots.TestCase
TestSlots.settings = examples(100, stateful_step_count=40)
