"""The loop with lists of messages instead of a socket, and a fake device."""

from __future__ import annotations

import time
from typing import Any

import pytest

from radixkv.errors import DeviceLost
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.wire import cache_messages
from radixkv.wire import messages as wire
from radixkv.wire.sampling import SamplingParams
from support.engine import token_bytes
from support.fake_device import FakeStep, expected_output
from support.loop_frontend import NAMESPACE, PROMPT, Frontend, done, failed


@pytest.fixture
def front() -> Frontend:
    return Frontend(max_queued_requests=3)


def messages_of(front: Frontend, *submits: wire.Submit) -> list[wire.FromRuntime]:
    """Returns all messages about some requests, in their order."""
    messages = [message for submit in submits for message in front.loop.receive(submit)]
    while front.loop.has_work:
        messages += front.loop.turn()
    return messages


def submit(request_id: str, prompt: list[int] = PROMPT, **options: Any) -> wire.Submit:
    return wire.Submit(request_id, token_bytes(prompt), SamplingParams(temperature=0.0, max_tokens=4), **options)


def test_a_step_is_launched_before_the_previous_result_is_taken(front: Frontend) -> None:
    front.serve("a", max_tokens=4)
    overlapped = "launch 0, launch 1, result 0, launch 2, result 1, launch 3, result 2, result 3"
    assert ", ".join(front.device.trace) == overlapped


def test_a_device_that_is_lost_is_noticed_without_a_request(front: Frontend) -> None:
    """By whoever drives a loop that has no work, when the messages of its last turn have been taken."""
    front.loop.advance()
    front.submit("a", max_tokens=1)
    front.device.loss = "a rank has ended"
    front.run()
    assert done(front.received["a"]).n_output_tokens == 1
    with pytest.raises(DeviceLost, match="a rank has ended"):
        front.loop.advance()


def test_all_tokens_of_a_step_are_in_one_message(front: Frontend) -> None:
    messages = messages_of(front, *(submit(f"r{i}") for i in range(3)))
    assert [len(message.items) for message in messages if isinstance(message, wire.Tokens)] == [3, 3, 3, 3]


def test_end_of_sequence_stops_unless_ignored() -> None:
    second = expected_output(NAMESPACE, PROMPT, 2)[1]
    front = Frontend(eos_token_ids=frozenset([second]))
    front.submit("a", temperature=0.0)
    front.submit("b", temperature=0.0, ignore_eos=True)
    front.submit("c", temperature=0.0, ignore_eos=True, stop_token_ids=(second,))
    front.run()
    ends = [(done(front.received[i]).finish_reason, done(front.received[i]).n_output_tokens) for i in "abc"]
    assert ends == [("stop", 2), ("length", 6), ("stop", 2)]
    assert [front.received[i].stop_token_ids for i in "ab"] == [{0: second}, {}]


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
    front: Frontend, tokens: bytes, sampling: dict[str, int], code: str, text_part: str
) -> None:
    (refusal,) = front.loop.receive(wire.Submit("bad", tokens, SamplingParams(**sampling)))
    assert refusal.code == code
    assert text_part in refusal.text
    assert not front.loop.has_work


def test_without_max_tokens_the_output_fills_the_context(front: Frontend) -> None:
    assert done(front.serve("a", range(1, 91), max_tokens=None)).n_output_tokens == 10


def test_a_request_larger_than_the_pool_is_refused() -> None:
    front = Frontend(n_pages=4)
    assert failed(front.serve("a", range(10), max_tokens=8)).code == "context_length_exceeded"
    assert done(front.serve("b", range(10), max_tokens=7)).n_output_tokens == 7


def test_a_full_queue_and_a_draining_server_refuse_requests(front: Frontend) -> None:
    for request_id in "abcd":
        front.submit(request_id)
    front.loop.receive(wire.Drain())
    front.submit("late")
    assert [failed(front.received[i]).code for i in ("d", "late")] == ["queue_full", "draining"]
    front.run()
    assert all(done(front.received[i]) for i in "abc")


def test_a_submit_with_an_id_in_use_is_ignored(front: Frontend) -> None:
    messages = messages_of(front, submit("a"), submit("a"))
    assert sum(isinstance(message, wire.Done) for message in messages) == 1


def test_flush_reports_the_pages_that_are_still_leased(front: Frontend) -> None:
    front.serve("a", range(16), max_tokens=4)
    front.submit("b", range(20))
    front.turn()
    (flushed,) = front.loop.receive(cache_messages.Flush("f"))
    assert (flushed.n_pages_freed, flushed.n_pages_leased) == (0, 5)
    front.run()
    assert done(front.serve("c", range(16))).cache_use.n_cached == 0


def test_the_part_of_a_page_that_was_copied_is_counted_as_cached(front: Frontend) -> None:
    front.serve("a", range(16))
    for request_id, n_tokens, n_copied in (("b", 15, 2), ("c", 16, 0)):
        use = done(front.serve(request_id, range(n_tokens))).cache_use
        assert (use.n_cached, use.n_copied) == (n_tokens - 1, n_copied)
    assert (front.stats().cache_use.n_cached, front.stats().cache_use.n_copied) == (14 + 15, 2)


def test_the_first_token_comes_with_what_the_cache_gave_and_got(front: Frontend) -> None:
    def computed(prompt: list[int], **options: Any) -> tuple[int, int, int]:
        messages = messages_of(front, submit("a", prompt, **options))
        first, *others = [message for message in messages if isinstance(message, wire.Tokens)]
        assert [item.id for item in first.items] == ["a"]
        assert not any(message.computed for message in others)
        (found,) = first.computed
        assert found.id == "a"
        return found.cache_use.n_cached, found.cache_use.n_copied, found.cache_use.n_added

    tokens = list(range(1, 27))
    assert computed(tokens[:16]) == (0, 0, 16)
    assert computed(tokens[:16]) == (15, 0, 0), "the last token is computed again, in a page that is cached"
    assert computed(tokens[:15]) == (14, 2, 0), "the last page is not whole"
    assert computed(tokens) == (16, 0, 8)
    assert computed([*tokens[:15], 99]) == (15, 3, 4)
    assert computed(tokens[:16], reads_cache=False) == (0, 0, 0), "it is computed, and nothing of it is new"


def test_stats_count_what_running_requests_store_share_and_hold_twice(front: Frontend) -> None:
    for request_id in ("a", "b"):
        front.submit(request_id, range(18), temperature=0.0, max_tokens=10)
    front.turn()
    stats = front.stats()
    assert stats.n_running == 2
    assert stats.n_running_slots == 4 * (4 + 1 + 1), "both hold the same four pages, and one page each"
    assert stats.n_running_tokens == 16 + 2 + 2
    assert (stats.n_duplicate_tokens, stats.n_saved_tokens) == (2, 16)
    front.run()
    stats = front.stats()
    assert not any((stats.n_running_slots, stats.n_running_tokens, stats.n_duplicate_tokens, stats.n_saved_tokens))


def test_schedule_seconds_include_planning_and_results_but_not_the_device(
    front: Frontend, monkeypatch: pytest.MonkeyPatch
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
    front.serve("a", max_tokens=10)
    stats = front.stats()
    assert stats.steps_total == 10
    assert stats.schedule_seconds >= 2 * stats.steps_total * slow_s
    assert stats.step_seconds - stats.schedule_seconds >= stats.steps_total * slow_s


def test_times_of_the_device_count_only_steps_that_did_not_fail(front: Frontend) -> None:
    device = front.device
    device.fail_steps, device.step_s = {3}, 0.25
    front.serve("a", max_tokens=10)
    stats = front.stats()
    assert stats.steps_total > len(device.executed) > 9
    assert stats.device_busy_seconds == device.step_s * len(device.executed)
