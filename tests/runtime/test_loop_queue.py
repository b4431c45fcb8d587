"""Timeouts, limits, explanations and random sessions, as they cross the wire."""

from __future__ import annotations

import gc
import random

import pytest

from radixkv import wire
from radixkv.runtime.request import Request
from radixkv.tree.node import Lease
from support.engine import token_bytes
from support.fake_device import answer
from support.loop_frontend import HERE, PROMPT, Frontend, done, failed


def test_who_waits_too_long_for_the_first_step_fails_though_the_loop_is_busy_with_others() -> None:
    front = Frontend(max_num_seqs=1, queue_timeout_s=5.0)
    front.submit("long", max_tokens=60)
    front.turn()
    front.submit("late", range(20, 30))
    front.now = 4.9
    front.turn()
    assert front.heard["late"].last is None
    front.now = 5.1
    front.turn()
    assert failed(front.heard["late"]).code == "queue_timeout"
    assert "5.1 s" in failed(front.heard["late"]).text
    front.now = 1000.0
    front.run()
    assert done(front.heard["long"]).n_output_tokens == 60, "what has run never times out"


def test_who_is_blocked_for_want_of_pages_times_out_and_a_retracted_one_does_not() -> None:
    front = Frontend(n_pages=16, queue_timeout_s=5.0)
    front.submit("a", max_tokens=40, seed=1)
    front.submit("b", range(20, 31), max_tokens=40)
    front.turn()
    front.submit("blocked", range(40, 100), max_tokens=1)
    while not front.loop._scheduler.n_preemptions:
        front.now += 0.01
        front.turn()
    front.now += 10.0
    front.turn()
    assert failed(front.heard["blocked"]).code == "queue_timeout"
    front.run()
    assert done(front.heard["b"]).n_output_tokens == 40


def test_all_that_wait_time_out_and_nothing_is_left_to_do() -> None:
    front = Frontend(queue_timeout_s=1.0)
    front.submit("a", n=3)
    front.submit("b")
    front.now = 2.0
    front.turn()
    assert [failed(front.heard[i]).code for i in "ab"] == ["queue_timeout"] * 2
    assert not front.loop.has_work


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"priority": -(1 << 31) - 1}, "priority"),
        ({"priority": 1 << 31}, "priority"),
        ({"salt": "x" * 129}, "cache_salt"),
        ({"salt": "é" * 65}, "cache_salt"),
        ({"stop_token_ids": (1000,)}, "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"logit_bias": {1000: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    ],
)
def test_the_least_wrong_values_are_refused_by_name(changes: dict[str, object], param: str) -> None:
    front = Frontend()
    front.submit("bad", **changes)  # type: ignore[arg-type]
    assert (failed(front.heard["bad"]).code, failed(front.heard["bad"]).param) == ("invalid_request", param)
    front.submit("canary")
    front.run()
    assert front.heard["canary"].tokens[0] == answer(HERE, PROMPT, 6, seed=5)


def test_the_last_right_values_are_taken() -> None:
    front = Frontend()
    front.submit("a", priority=-(1 << 31), stop_token_ids=(999, 0), logit_bias={999: 1.0, 0: -1.0})
    front.submit("b", priority=(1 << 31) - 1)
    front.run()
    assert all(done(heard) for heard in front.heard.values())


def test_many_choices_count_as_one_request_of_the_queue() -> None:
    front = Frontend(max_queued_requests=2, max_num_seqs=1)
    front.submit("a", n=8)
    front.submit("b", n=8)
    front.submit("c")
    assert failed(front.heard["c"]).code == "queue_full"
    front.turn()
    front.submit("d")
    front.run()
    assert [done(front.heard[i]).n_output_tokens for i in "abd"] == [48, 48, 6]


def n_objects() -> int:
    return sum(type(one) in (Request, Lease) for one in gc.get_objects())


def test_nothing_of_a_request_is_left_for_the_collector_which_is_off() -> None:
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
        assert failed(front.heard["refused"]).code == "queue_full"
        assert n_objects() == n_before
    finally:
        gc.enable()


def test_explain_says_how_much_is_cached_and_what_differs() -> None:
    front = Frontend()
    front.submit("a", range(1, 13))
    front.run()
    assert front.explain(range(1, 13)) == wire.Explained("e", 12, 12, "whole")
    found = front.explain([*range(1, 11), 99, 98])
    assert (found.n_cached, found.reason, found.first_difference) == (8, "differs", 10)
    assert (found.token, found.cached_token) == (99, 11)
    found = front.explain(range(1, 13), salt="hers")
    assert (found.n_cached, found.reason, found.n_cached_elsewhere) == (0, "other_namespace", 12)
    assert (found.first_difference, found.token, found.cached_token) == (None, None, None)
    front.loop._scheduler.cache.tree.evict(64)
    assert front.explain(range(1, 13)).reason == "evicted", "though its namespace has nothing any more"
    assert front.explain(range(2, 13)).reason == "never_seen"


def test_explain_without_contents_tells_no_token_of_others_and_no_other_salt() -> None:
    front = Frontend()
    front.submit("a", range(1, 13))
    front.run()
    nearly = [*range(1, 11), 99, 98]
    assert front.explain(nearly, contents=False) == wire.Explained("e", 12, 8, "differs")
    assert front.explain(range(1, 13), "hers", contents=False) == wire.Explained("e", 12, 0, "never_seen")


def test_explain_checks_its_tokens_and_its_salt() -> None:
    front = Frontend()
    for message, param in (
        (wire.Explain("e", b""), "prompt"),
        (wire.Explain("e", b"abc"), "prompt"),
        (wire.Explain("e", token_bytes([1000])), "prompt"),
        (wire.Explain("e", token_bytes([1]), "x" * 129), "cache_salt"),
    ):
        (answered,) = front.loop.receive(message)
        assert isinstance(answered, wire.Failed)
        assert (answered.code, answered.param) == ("invalid_request", param)


@pytest.mark.parametrize("block", range(4))
def test_random_sessions_keep_the_rules_of_the_wire(block: int) -> None:
    for seed in range(block * 25, block * 25 + 25):
        rng = random.Random(seed)
        front = Frontend(
            n_pages=rng.choice((24, 48)), max_num_seqs=4, max_num_batched_tokens=16, queue_timeout_s=50
        )
        for number in range(rng.randrange(2, 10)):
            first = rng.randrange(1, 4)
            front.submit(
                f"r{number}",
                range(first, first + rng.randrange(1, 30)),
                n=rng.choice((1, 2, 4)),
                max_tokens=rng.randrange(1, 20),
                prompt_logprobs=rng.choice((None, None, 0)),
                frequency_penalty=rng.choice((0.0, 1.0)),
                logprobs=rng.choice((None, 1)),
                priority=rng.choice((0, 0, 1)),
            )
            for _ in range(rng.randrange(6)):
                front.now += rng.random()
                event = rng.random()
                if event < 0.05:
                    front.device.fail_steps.add(front.loop._counters.steps + 1)
                elif event < 0.12:
                    front.device.nan_logits_slots.add(rng.randrange(4))
                elif event < 0.2:
                    front.cancel(f"r{rng.randrange(number + 1)}", rng.choice((None, 0, 1)))
                if front.loop.has_work:
                    front.turn()
        front.device.fail_steps.clear()
        front.run()
        assert all(heard.last is not None for heard in front.heard.values())
        assert front.stats().n_pages_free + front.stats().n_pages_evictable == front.device.n_pages
