"""Several choices, logprobs and prompt logprobs in messages of the loop."""

from __future__ import annotations

import pytest

from radixkv.runtime.intake import Intake
from radixkv.settings.config import MAX_SEED
from radixkv.tree.marks import Marks
from radixkv.wire.messages import Submit, pack_tokens
from radixkv.wire.sampling import SamplingParams
from support.fake_device import chain, expected_output, expected_prompt_logprobs, logprobs_of
from support.loop_frontend import NAMESPACE, PROMPT, Frontend, done, failed


def test_each_choice_ends_in_its_tokens_before_one_done_with_the_totals() -> None:
    front = Frontend()
    received = front.serve("a", n=3)
    assert received.tokens == {i: expected_output(NAMESPACE, PROMPT, 6, seed=5 + i) for i in range(3)}
    assert received.finish_reasons == dict.fromkeys(range(3), "length")
    assert (done(received).n_prompt_tokens, done(received).n_output_tokens, done(received).cache_use.n_cached) == (
        11,
        18,
        0,
    )
    stats = front.stats()
    assert (stats.prompt_tokens_total, stats.prefix_queries_total, stats.cache_use.n_cached) == (11, 11, 0)
    assert stats.generation_tokens_total == 18


def test_choices_that_are_cancelled_before_they_start_have_no_output() -> None:
    front = Frontend()
    front.submit("a", n=3)
    front.cancel("a", None)
    assert done(front.received["a"]).n_output_tokens == 0


def test_a_waiting_request_holds_its_prompt_once() -> None:
    front = Frontend()
    submit = Submit("a", pack_tokens(PROMPT), SamplingParams(n=64))
    choices = Intake(front.loop.ready, marks=Marks()).make_choices(submit)
    assert sum(len(choice.known_key) for choice in choices) == len(submit.tokens)


def test_cached_tokens_of_several_choices_are_counted_once() -> None:
    front = Frontend(max_num_seqs=2)
    front.serve("a")
    assert done(front.serve("b", n=4)).cache_use.n_cached == 10
    stats = front.stats()
    assert (stats.prompt_tokens_total, stats.prefix_queries_total, stats.cache_use.n_cached) == (22, 22, 10)


def test_seeds_of_choices_wrap_at_the_maximum() -> None:
    front = Frontend()
    assert front.serve("a", n=2, seed=MAX_SEED).tokens[1] == expected_output(NAMESPACE, PROMPT, 6, seed=0)


def test_a_cancelled_choice_ends_at_once_and_the_others_go_on() -> None:
    front = Frontend()
    front.submit("a", n=3, max_tokens=20)
    front.turn(4)
    front.cancel("a", 1)
    received = front.received["a"]
    assert received.finish_reasons == {1: "abort"}
    for unknown in (1, 3, -1):
        front.cancel("a", unknown)
    front.run()
    assert received.finish_reasons == {0: "length", 1: "abort", 2: "length"}
    assert received.tokens[2] == expected_output(NAMESPACE, PROMPT, 20, seed=7)


@pytest.mark.parametrize("n_turns", [0, 1, 3])
def test_the_last_choice_that_is_cancelled_ends_the_request(n_turns: int) -> None:
    front = Frontend()
    front.submit("a", n=3, max_tokens=20)
    front.turn(n_turns)
    for choice in (0, 2, 1):
        assert front.received["a"].terminal is None
        front.cancel("a", choice)
    assert done(front.received["a"]).finish_reason == "abort"
    front.run()
    assert front.stats().n_pages_free + front.stats().n_pages_evictable == 64


@pytest.mark.parametrize("n_turns", [0, 1, 2, 3, 5])
def test_a_cancelled_request_ends_with_all_its_choices(n_turns: int) -> None:
    front = Frontend()
    front.submit("a", n=5, max_tokens=20)
    front.turn(n_turns)
    for _ in range(2):  # an unknown request is not cancelled
        front.cancel("a")
    assert done(front.received["a"]).finish_reason == "abort"
    front.run()
    assert front.stats().n_pages_free + front.stats().n_pages_evictable == 64


def test_a_choice_that_fails_fails_the_request_and_ends_the_others() -> None:
    front = Frontend()
    front.submit("a", n=3, max_tokens=20)
    front.submit("b", range(30, 50))
    front.turn(3)
    victim = next(request for request in front.scheduler.running if (request.id, request.choice) == ("a", 1))
    while front.received["a"].terminal is None:
        if victim.batch_slot >= 0:
            front.device.nan_logits_slots.add(victim.batch_slot)
        front.turn()
    assert failed(front.received["a"]).code == "numerical_error"
    front.run()
    assert front.received["b"].tokens[0] == expected_output(NAMESPACE, list(range(30, 50)), 6, seed=5)
    assert front.stats().n_pages_free + front.stats().n_pages_evictable == 64


def test_logprobs_are_reported_with_their_tokens() -> None:
    front = Frontend()
    received = front.serve("a", logprobs=1)
    known = PROMPT + received.tokens[0]
    assert received.logprobs == [logprobs_of(chain(NAMESPACE, known[: 11 + i]), known[11 + i]) for i in range(6)]


def test_a_stop_token_is_banned_until_the_output_has_min_tokens() -> None:
    second = expected_output(NAMESPACE, PROMPT, 2)[1]
    front = Frontend()
    front.submit("early", temperature=0.0, stop_token_ids=(second,))
    front.serve("late", temperature=0.0, stop_token_ids=(second,), min_tokens=4)
    assert front.received["early"].finish_reasons == {0: "stop"}
    right = expected_output(NAMESPACE, PROMPT, 6, [second], min_tokens=4, banned=[second])
    assert front.received["late"].tokens[0] == right
    assert len(right) > 2


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("budget", [11, 64])
def test_prompt_logprobs_come_once_in_order_even_if_the_prompt_is_cached(n: int, budget: int) -> None:
    front = Frontend(max_num_batched_tokens=budget)
    prompt = list(range(1, 31))
    front.serve("warm", prompt)
    received = front.serve("a", prompt, n=n, prompt_logprobs=1)
    assert received.prompt_logprobs == expected_prompt_logprobs(NAMESPACE, prompt)
    assert done(received).cache_use.n_cached == 0
    front.serve("again", prompt)
    assert done(front.received["again"]).cache_use.n_cached == 29, (
        "the request with prompt logprobs has filled the cache"
    )


def test_a_prompt_of_one_token_has_no_prompt_logprobs() -> None:
    front = Frontend()
    front.serve("a", [3], prompt_logprobs=0)
    assert front.received["a"].prompt_logprobs == []
    assert done(front.received["a"]).finish_reason == "length"
