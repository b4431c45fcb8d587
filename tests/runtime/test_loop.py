"""The loop with lists of messages instead of a socket, and a fake device."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from radixkv.runtime.assemble import assemble_loop
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.loop import Loop
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.step.plan import StepPlan
from radixkv.tree.node import Namespace
from radixkv.wire import cache_messages
from radixkv.wire import messages as wire
from radixkv.wire.sampling import SamplingParams
from radixkv.wire.stats import Stats
from support.engine import PoisoningList, token_bytes
from support.fake_device import FakeDevice, FakeStep, expected_output
from support.fake_grammars import FakeCompiler
from support.scheduler import make_scheduler

EOS = 999


class OneNamespaceDevice(FakeDevice):
    """A fake device for tests in which all requests have the default namespace."""

    def launch(self, plan: StepPlan) -> FakeStep:
        self.namespaces.update({row.batch_slot: Namespace() for row in plan.rows})
        return super().launch(plan)


@pytest.fixture
def device() -> FakeDevice:
    return OneNamespaceDevice(64, 4)


def make_loop(device: FakeDevice, eos_token_ids: frozenset[int] = frozenset([EOS])) -> Loop:
    cache = PageCache(64, 4, min_copied_tokens=1, free_pages=PoisoningList(device))
    scheduler = make_scheduler(cache, max_num_seqs=4, max_num_batched_tokens=64, max_queued_requests=3)
    return assemble_loop(
        scheduler, device, open_grammars=FakeCompiler, max_model_len=100, eos_token_ids=eos_token_ids
    )


@pytest.fixture
def loop(device: FakeDevice) -> Loop:
    return make_loop(device)


def submit(request_id: str, n_tokens: int = 10, **sampling: object) -> wire.Submit:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **sampling})
    return wire.Submit(request_id, token_bytes(range(1, n_tokens + 1)), params)


def run(loop: Loop) -> list[wire.FromRuntime]:
    messages: list[wire.FromRuntime] = []
    for _ in range(1000):
        if not loop.has_work:
            return messages
        messages += loop.turn()
        loop.check()
    raise AssertionError("the loop does not come to an end")


def tokens_of(messages: list[wire.FromRuntime], request_id: str) -> list[int]:
    items = [item for message in messages if isinstance(message, wire.Tokens) for item in message.items]
    return [int.from_bytes(item.tokens, "little") for item in items if item.id == request_id]


def test_a_request_gets_its_tokens_and_then_one_terminal_message(loop: Loop) -> None:
    assert loop.receive(submit("a")) == []
    messages = run(loop)
    assert tokens_of(messages, "a") == expected_output(Namespace(), range(1, 11), 4)
    done = messages[-1]
    assert isinstance(done, wire.Done)
    assert (done.finish_reason, done.n_prompt_tokens, done.n_output_tokens, done.cache_use.n_cached) == (
        "length",
        10,
        4,
        0,
    )
    assert sum(isinstance(m, (wire.Done, wire.Failed)) for m in messages) == 1


def test_a_step_is_launched_before_the_previous_result_is_taken(loop: Loop, device: FakeDevice) -> None:
    loop.receive(submit("a"))
    run(loop)
    assert device.trace == [
        "launch 0",
        "launch 1",
        "result 0",
        "launch 2",
        "result 1",
        "launch 3",
        "result 2",
        "result 3",
    ]


def test_all_tokens_of_a_step_are_in_one_message(loop: Loop) -> None:
    for i in range(3):
        loop.receive(submit(f"r{i}"))
    items_by_step = [m.items for m in run(loop) if isinstance(m, wire.Tokens)]
    assert [len(items) for items in items_by_step] == [3, 3, 3, 3]


def test_end_of_sequence_stops_unless_ignored(device: FakeDevice) -> None:
    second = expected_output(Namespace(), range(1, 11), 2)[1]
    loop = make_loop(device, frozenset([second]))
    loop.receive(submit("a"))
    loop.receive(submit("b", ignore_eos=True))
    loop.receive(submit("c", ignore_eos=True, stop_token_ids=(second,)))
    messages = run(loop)
    done = {m.id: m for m in messages if isinstance(m, wire.Done)}
    assert [(done[i].finish_reason, done[i].n_output_tokens) for i in "abc"] == [
        ("stop", 2),
        ("length", 4),
        ("stop", 2),
    ]
    items = [item for m in messages if isinstance(m, wire.Tokens) for item in m.items]
    stop_ids = {item.id: item.stop_token_id for item in items if item.finish_reason is not None}
    assert (stop_ids["a"], stop_ids["b"]) == (second, None)


@pytest.mark.parametrize(
    ("tokens", "sampling", "code", "text_part"),
    [
        (b"", {}, "invalid_request", "is empty"),
        (b"abc", {}, "invalid_request", "3 bytes"),
        (token_bytes([1, -1]), {}, "invalid_request", "token id -1"),
        (token_bytes([1, 1000]), {}, "invalid_request", "token id 1000"),
        (token_bytes([1] * 100), {}, "context_length_exceeded", "100 tokens"),
        (token_bytes([1] * 90), {"max_tokens": 11}, "context_length_exceeded", "max_tokens is 11"),
    ],
)
def test_an_invalid_request_fails_alone(
    loop: Loop, tokens: bytes, sampling: dict[str, int], code: str, text_part: str
) -> None:
    (failed,) = loop.receive(wire.Submit("bad", tokens, SamplingParams(**sampling)))
    assert isinstance(failed, wire.Failed)
    assert failed.code == code
    assert text_part in failed.text
    assert not loop.has_work


def test_without_max_tokens_the_output_fills_the_context(loop: Loop) -> None:
    loop.receive(submit("a", 90, max_tokens=None))
    done = run(loop)[-1]
    assert isinstance(done, wire.Done)
    assert done.n_output_tokens == 10


def test_a_request_larger_than_the_pool_is_refused(device: FakeDevice) -> None:
    cache = PageCache(4, 4)
    scheduler = make_scheduler(cache, max_num_seqs=4, max_num_batched_tokens=64)
    loop = assemble_loop(scheduler, device, open_grammars=FakeCompiler, max_model_len=100)
    (failed,) = loop.receive(submit("a", 10, max_tokens=8))
    assert isinstance(failed, wire.Failed)
    assert failed.code == "context_length_exceeded"
    assert loop.receive(submit("b", 10, max_tokens=7)) == []
    done = run(loop)[-1]
    assert isinstance(done, wire.Done)
    assert done.n_output_tokens == 7


def test_a_full_queue_and_a_draining_server_refuse_requests(loop: Loop) -> None:
    for i in range(3):
        assert loop.receive(submit(f"r{i}")) == []
    (full,) = loop.receive(submit("r3"))
    loop.receive(wire.Drain())
    (late,) = loop.receive(submit("r4"))
    assert isinstance(full, wire.Failed)
    assert isinstance(late, wire.Failed)
    assert (full.code, late.code) == ("queue_full", "draining")
    assert len([m for m in run(loop) if isinstance(m, wire.Done)]) == 3


def test_cancel_ends_a_request_at_once_and_only_once(loop: Loop) -> None:
    loop.receive(submit("a", max_tokens=50))
    loop.turn()
    loop.turn()
    (done,) = loop.receive(wire.Cancel("a"))
    assert isinstance(done, wire.Done)
    assert done.finish_reason == "abort"
    assert loop.receive(wire.Cancel("a")) == []
    assert not [m for m in run(loop) if isinstance(m, (wire.Done, wire.Failed))]
    (stats,) = loop.receive(wire.GetStats("s"))
    assert isinstance(stats, Stats)
    assert stats.n_pages_free + stats.n_pages_evictable == 64


def test_a_submit_with_an_id_in_use_is_ignored(loop: Loop) -> None:
    loop.receive(submit("a"))
    loop.receive(submit("a"))
    assert sum(isinstance(m, wire.Done) for m in run(loop)) == 1


def test_flush_reports_the_pages_that_are_still_leased(loop: Loop) -> None:
    loop.receive(submit("a", 16))
    run(loop)
    loop.receive(submit("b", 20))
    loop.turn()
    (flushed,) = loop.receive(cache_messages.Flush("f"))
    assert isinstance(flushed, cache_messages.Flushed)
    assert (flushed.n_pages_freed, flushed.n_pages_leased) == (0, 5)
    run(loop)
    loop.receive(submit("c", 16))
    done = run(loop)[-1]
    assert isinstance(done, wire.Done)
    assert done.cache_use.n_cached == 0


def test_stats_count_each_prompts_hits_once_in_tokens(loop: Loop) -> None:
    loop.receive(submit("a", 16))
    run(loop)
    loop.receive(submit("b", 18))
    run(loop)
    (stats,) = loop.receive(wire.GetStats("s"))
    assert isinstance(stats, Stats)
    assert (stats.prefix_queries_total, stats.cache_use.n_cached) == (34, 16)
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (34, 8)
    assert stats.step_seconds >= stats.schedule_seconds >= 0


def test_the_part_of_a_page_that_was_copied_is_counted_as_cached(loop: Loop) -> None:
    loop.receive(submit("a", 16))
    run(loop)
    for request_id, n_tokens in (("b", 15), ("c", 16)):
        loop.receive(submit(request_id, n_tokens))
        done = run(loop)[-1]
        assert isinstance(done, wire.Done)
        assert (done.cache_use.n_cached, done.cache_use.n_copied) == (n_tokens - 1, 2 if n_tokens == 15 else 0)
    (stats,) = loop.receive(wire.GetStats("s"))
    assert isinstance(stats, Stats)
    assert (stats.cache_use.n_cached, stats.cache_use.n_copied) == (14 + 15, 2)


def test_the_first_token_comes_with_what_the_cache_gave_and_got() -> None:
    def computed(request_id: str, n_tokens: int) -> tuple[int, int, int]:
        loop.receive(submit(request_id, n_tokens))
        first, *others = [message for message in run(loop) if isinstance(message, wire.Tokens)]
        assert [item.id for item in first.items] == [request_id]
        assert not any(message.computed for message in others)
        (found,) = first.computed
        assert found.id == request_id
        return found.cache_use.n_cached, found.cache_use.n_copied, found.cache_use.n_added

    loop = make_loop(OneNamespaceDevice(64, 4))
    assert computed("a", 16) == (0, 0, 16)
    assert computed("the same", 16) == (15, 0, 0), "the last token is computed again, in a page that is cached"
    assert computed("shorter", 15) == (14, 2, 0), "the last page is not whole"
    assert computed("longer", 26) == (16, 0, 8)
    other = msgspec.structs.replace(submit("other"), tokens=token_bytes([*range(1, 16), 99]))
    loop.receive(other)
    (found,) = [each for message in run(loop) if isinstance(message, wire.Tokens) for each in message.computed]
    assert (found.cache_use.n_cached, found.cache_use.n_copied, found.cache_use.n_added) == (15, 3, 4)
    loop.receive(msgspec.structs.replace(submit("again", 16), reads_cache=False))
    (found,) = [each for message in run(loop) if isinstance(message, wire.Tokens) for each in message.computed]
    assert (found.cache_use.n_cached, found.cache_use.n_added) == (0, 0), "it is computed, and nothing of it is new"


def test_stats_count_what_running_requests_store_share_and_hold_twice(loop: Loop) -> None:
    for request_id in ("a", "b"):
        loop.receive(submit(request_id, 18, max_tokens=10))
    loop.turn()
    (stats,) = loop.receive(wire.GetStats("s"))
    assert isinstance(stats, Stats)
    assert stats.n_running == 2
    assert stats.n_running_slots == 4 * (4 + 1 + 1), "both hold the same four pages, and one page each"
    assert stats.n_running_tokens == 16 + 2 + 2
    assert (stats.n_duplicate_tokens, stats.n_saved_tokens) == (2, 16)
    run(loop)
    (stats,) = loop.receive(wire.GetStats("s"))
    assert isinstance(stats, Stats)
    assert (stats.n_running_slots, stats.n_running_tokens, stats.n_duplicate_tokens, stats.n_saved_tokens) == (
        0,
    ) * 4


def test_schedule_seconds_include_planning_and_results_but_not_the_device(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_s = 0.004

    def slow(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def slowed(*args: Any) -> Any:
            time.sleep(slow_s)
            return method(*args)

        monkeypatch.setattr(kind, name, slowed)

    for kind, name in ((Scheduler, "schedule"), (Scheduler, "complete"), (FakeStep, "result")):
        slow(kind, name)
    loop.receive(submit("a", 10, max_tokens=10))
    run(loop)
    (stats,) = loop.receive(wire.GetStats("s"))
    assert isinstance(stats, Stats)
    assert stats.steps_total == 10
    assert stats.schedule_seconds >= 2 * stats.steps_total * slow_s
    assert stats.step_seconds - stats.schedule_seconds >= stats.steps_total * slow_s


def test_times_of_the_device_count_only_steps_that_did_not_fail(loop: Loop, device: FakeDevice) -> None:
    device.fail_steps, device.step_s = {3}, 0.25
    loop.receive(submit("a", 10, max_tokens=10))
    run(loop)
    (stats,) = loop.receive(wire.GetStats("s"))
    assert isinstance(stats, Stats)
    assert stats.steps_total > len(device.executed) > 9
    assert stats.device_busy_seconds == device.step_s * len(device.executed)


def test_a_repeated_device_failure_fails_the_request_with_its_code(loop: Loop, device: FakeDevice) -> None:
    device.fail_steps = set(range(10))
    loop.receive(submit("a"))
    messages = run(loop)
    assert [m.code for m in messages if isinstance(m, wire.Failed)] == ["device_error"]


def test_requests_without_a_seed_get_different_ones(loop: Loop, device: FakeDevice) -> None:
    for request_id in "ab":
        loop.receive(submit(request_id, temperature=1.0))
    loop.receive(submit("c", temperature=1.0, seed=7))
    run(loop)
    seeds = [row.sampling.seed for row in device.executed[0].rows if row.sampling is not None]
    assert len(set(seeds)) == 3
    assert seeds[2] == 7
