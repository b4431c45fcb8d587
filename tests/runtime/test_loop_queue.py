"""Queue timeouts, limits and explanations in messages of the loop."""

from __future__ import annotations

import gc

import pytest

from radixkv.runtime.request import Request
from radixkv.tree.node import Lease
from radixkv.wire import cache_messages
from radixkv.wire.namespace import CacheNamespace
from support.engine import token_bytes
from support.fake_device import expected_output
from support.loop_frontend import NAMESPACE, PROMPT, Frontend, done, failed


def test_a_request_that_waits_too_long_for_its_first_step_fails_while_others_run() -> None:
    front = Frontend(max_num_seqs=1, queue_timeout_s=5.0)
    front.submit("long", max_tokens=60)
    front.turn()
    front.submit("late", range(20, 30))
    front.now = 4.9
    front.turn()
    assert front.received["late"].terminal is None
    front.now = 5.1
    front.turn()
    assert failed(front.received["late"]).code == "queue_timeout"
    assert "5.1 s" in failed(front.received["late"]).text
    front.now = 1000.0
    front.run()
    assert done(front.received["long"]).n_output_tokens == 60, "a request that has run never times out"


def test_a_request_blocked_by_a_full_pool_times_out_and_a_preempted_one_does_not() -> None:
    front = Frontend(n_pages=16, queue_timeout_s=5.0)
    front.submit("a", max_tokens=40, seed=1)
    front.submit("b", range(20, 31), max_tokens=40)
    front.turn()
    front.submit("blocked", range(40, 100), max_tokens=1)
    while not front.scheduler.n_preemptions:
        front.now += 0.01
        front.turn()
    front.now += 10.0
    front.turn()
    assert failed(front.received["blocked"]).code == "queue_timeout"
    front.run()
    assert done(front.received["b"]).n_output_tokens == 40


def test_all_waiting_requests_time_out_and_no_work_is_left() -> None:
    front = Frontend(queue_timeout_s=1.0)
    front.submit("a", n=3)
    front.submit("b")
    front.now = 2.0
    front.turn()
    assert [failed(front.received[i]).code for i in "ab"] == ["queue_timeout"] * 2
    assert not front.loop.has_work


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"priority": -(1 << 31) - 1}, "priority"),
        ({"priority": 1 << 31}, "priority"),
        ({"salt": "x" * 129}, "cache_salt"),
        ({"salt": "é" * 65}, "cache_salt"),
        ({"session_id": "é" * 65}, "session_id"),
        ({"session_id": "x" * 129, "reads_cache": False}, "session_id"),
        ({"session_id": "x" * 129, "prompt_logprobs": 1}, "session_id"),
        ({"stop_token_ids": (1000,)}, "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"logit_bias": {1000: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    ],
)
def test_values_just_outside_their_range_are_refused_by_name(changes: dict[str, object], param: str) -> None:
    front = Frontend()
    front.submit("bad", **changes)  # type: ignore[arg-type]
    assert (failed(front.received["bad"]).code, failed(front.received["bad"]).param) == ("invalid_request", param)
    assert front.serve("canary").tokens[0] == expected_output(NAMESPACE, PROMPT, 6, seed=5)


def test_values_at_the_ends_of_their_range_are_accepted() -> None:
    front = Frontend()
    front.submit("a", priority=-(1 << 31), stop_token_ids=(999, 0), logit_bias={999: 1.0, 0: -1.0})
    front.serve("b", priority=(1 << 31) - 1)
    assert all(done(received) for received in front.received.values())


def test_many_choices_count_as_one_queued_request() -> None:
    front = Frontend(max_queued_requests=2, max_num_seqs=1)
    front.submit("a", n=8)
    front.submit("b", n=8)
    front.submit("c")
    assert failed(front.received["c"]).code == "queue_full"
    front.turn()
    front.serve("d")
    assert [done(front.received[i]).n_output_tokens for i in "abd"] == [48, 48, 6]


def n_objects() -> int:
    return sum(type(one) in (Request, Lease) for one in gc.get_objects())


def test_a_request_leaves_no_garbage_for_the_disabled_collector() -> None:
    front = Frontend(max_queued_requests=1)
    gc.collect()
    n_before = n_objects()
    gc.disable()
    try:
        front.submit("first", n=3)
        front.submit("refused", n=3)
        front.turn()
        front.cancel("first", 0)
        front.run()
        front.submit("cancelled", n=3)
        front.cancel("cancelled")
        assert failed(front.received["refused"]).code == "queue_full"
        assert n_objects() == n_before
    finally:
        gc.enable()


def test_explain_reports_how_much_is_cached_and_what_differs() -> None:
    front = Frontend()
    front.serve("a", range(1, 13))
    assert front.explain(range(1, 13)) == cache_messages.Explained("e", 12, 11, "whole"), (
        "its last token is computed"
    )
    explained = front.explain([*range(1, 11), 99, 98])
    assert (explained.n_cached, explained.reason, explained.first_difference) == (10, "differs", 10)
    assert (explained.token, explained.cached_token) == (99, 11)
    explained = front.explain(range(1, 13), salt="hers")
    assert (explained.n_cached, explained.reason, explained.n_cached_elsewhere) == (0, "other_namespace", 12)
    assert (explained.first_difference, explained.token, explained.cached_token) == (None, None, None)
    front.scheduler.cache.tree.evict(64)
    assert front.explain(range(1, 13)).reason == "evicted", "even though its namespace is empty now"
    assert front.explain(range(2, 13)).reason == "never_seen"


def test_explain_without_contents_reveals_no_cached_token_and_no_other_salt() -> None:
    front = Frontend()
    front.serve("a", range(1, 13))
    similar = [*range(1, 11), 99, 98]
    assert front.explain(similar, contents=False) == cache_messages.Explained("e", 12, 8, "differs")
    assert front.explain(range(1, 13), "hers", contents=False) == cache_messages.Explained("e", 12, 0, "never_seen")


def test_an_invalidated_prefix_is_not_found() -> None:
    front = Frontend()
    front.serve("a", range(1, 13), max_tokens=1)
    assert front.explain(range(1, 13)).n_cached == 11
    tokens = token_bytes(list(range(1, 11)))
    assert front.loop.receive(cache_messages.Invalidate("i", tokens, CacheNamespace(cache_salt="hers"))) == [
        cache_messages.Invalidated("i", 0, 0)
    ]
    assert front.loop.receive(cache_messages.Invalidate("i", tokens)) == [cache_messages.Invalidated("i", 3, 0)]
    assert front.explain(range(1, 13)) == cache_messages.Explained("e", 12, 0, "never_seen")


def test_explain_and_invalidate_check_their_tokens_and_their_salt() -> None:
    front = Frontend()
    for message, param in (
        (cache_messages.Explain("e", b""), "prompt"),
        (cache_messages.Explain("e", b"abc"), "prompt"),
        (cache_messages.Explain("e", token_bytes([1000])), "prompt"),
        (cache_messages.Explain("e", token_bytes([1]), CacheNamespace(cache_salt="x" * 129)), "cache_salt"),
        (cache_messages.Invalidate("i", b"abc"), "prompt"),
        (cache_messages.Invalidate("i", token_bytes([1, 2, 3])), "prompt"),
        (cache_messages.Invalidate("i", token_bytes([1, 2, 3, 1000])), "prompt"),
        (cache_messages.Invalidate("i", b"", CacheNamespace(cache_salt="x" * 129)), "cache_salt"),
    ):
        (failed_message,) = front.loop.receive(message)
        assert (failed_message.code, failed_message.param) == ("invalid_request", param)
