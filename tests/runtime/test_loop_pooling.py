"""Prompts without answers in the loop, beside requests with answers, on a fake device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from radixkv.wire.messages import MAX_FRAME_BYTES, Pooling, Tokens, encode
from support.fake_device import chain, expected_output, pooled_of
from support.loop_frontend import NAMESPACE, PROMPT, Frontend, done, failed

STATE, LOGITS = Pooling(), Pooling((5, 7))
LONG = list(range(1, 81))


@pytest.fixture
def front() -> Frontend:
    return Frontend(max_num_batched_tokens=24)


def pooled(prompt: Iterable[int], pooling: Pooling = STATE) -> bytes:
    """Returns what the fake device reports of a prompt."""
    return pooled_of(chain(NAMESPACE, prompt), pooling)


def test_prompts_in_chunks_beside_answers_report_their_ends(front: Frontend) -> None:
    front.submit("answer", PROMPT, temperature=0.0)
    front.turn(2)
    for name, prompt, pooling in (("long", LONG, STATE), ("short", [9], LOGITS), ("same", PROMPT, LOGITS)):
        front.submit(name, prompt, pooling=pooling)
    front.run()
    assert front.received["answer"].tokens == {0: expected_output(NAMESPACE, PROMPT, 6)}
    for name, prompt, pooling in (("long", LONG, STATE), ("short", [9], LOGITS), ("same", PROMPT, LOGITS)):
        received = front.received[name]
        assert received.pooled == pooled(prompt, pooling)
        assert received.finish_reasons == {0: "stop"}
        assert (done(received).n_prompt_tokens, done(received).n_output_tokens) == (len(prompt), 0)
    stats = front.stats()
    assert stats.prompt_tokens_total == len(LONG) + 1 + 2 * len(PROMPT)
    assert stats.generation_tokens_total == 6


def test_a_hit_computes_only_what_is_missing(front: Frontend) -> None:
    assert done(front.serve("cold", LONG, pooling=STATE)).cache_use.n_cached == 0
    first = len(front.device.computed)
    warm = front.serve("warm", LONG, pooling=STATE)
    assert warm.pooled == pooled(LONG)
    assert done(warm).cache_use.n_cached == 79
    assert sum(n_tokens for *_, n_tokens in front.device.computed[first:]) == 1
    answer = front.serve("answer", LONG, temperature=0.0)
    assert done(answer).cache_use.n_cached == 79
    assert answer.tokens == {0: expected_output(NAMESPACE, LONG, 6)}


def test_many_states_of_one_step_are_sent_in_messages_that_the_frontend_takes(front: Frontend) -> None:
    front.device.pooled_bytes = 3 << 20
    names = [f"prompt {n}" for n in range(8)]
    for n, name in enumerate(names):
        front.submit(name, [1 + n], pooling=STATE)
    sent = []
    for _ in range(3):
        messages = front.loop.turn()
        sent += [message for message in messages if isinstance(message, Tokens)]
        front.take(messages)
    assert all(len(encode(message)) < MAX_FRAME_BYTES for message in sent)
    assert [item.id for message in sent for item in message.items] == names
    assert len({plan.step for plan in front.device.executed}) == 1, "one step"
    for n, name in enumerate(names):
        assert front.received[name].pooled == pooled([1 + n]).ljust(3 << 20)
        assert done(front.received[name]).n_prompt_tokens == 1


def test_prompts_survive_a_failed_step(front: Frontend) -> None:
    front.device.fail_steps = {1}
    for name, n in (("a", 80), ("b", 30), ("c", 5)):
        front.submit(name, LONG[:n], pooling=STATE)
    front.run()
    assert [front.received[name].pooled for name in "abc"] == [pooled(LONG[:n]) for n in (80, 30, 5)]


def test_a_prompt_may_fill_context_and_pool_and_not_exceed_them() -> None:
    front = Frontend(n_pages=64)
    assert front.serve("full", range(1, 101), pooling=STATE).pooled == pooled(range(1, 101))
    assert failed(front.serve("beyond", range(1, 102), pooling=STATE)).code == "context_length_exceeded"
    small = Frontend(n_pages=10)
    assert small.serve("full", range(1, 41), pooling=STATE).pooled == pooled(range(1, 41))
    refused = failed(small.serve("beyond", range(1, 42), pooling=STATE))
    assert refused.code == "context_length_exceeded"
    assert "the pool holds 40 tokens" in refused.text


def test_a_cancelled_prompt_reports_nothing(front: Frontend) -> None:
    front.submit("a", LONG, pooling=STATE)
    front.turn(2)
    front.cancel("a")
    front.run()
    assert front.received["a"].pooled is None
    assert done(front.received["a"]).finish_reason == "abort"


@pytest.mark.parametrize(
    ("pooling", "sampling", "said"),
    [
        (Pooling((1000,)), {}, "token id 1000"),
        (Pooling((-1,)), {}, "token id -1"),
        (STATE, {"max_tokens": 3}, "sampling parameters"),
        (STATE, {"n": 2}, "sampling parameters"),
        (STATE, {"prompt_logprobs": 1}, "sampling parameters"),
    ],
)
def test_what_cannot_be_pooled_is_refused(
    front: Frontend, pooling: Pooling, sampling: dict[str, Any], said: str
) -> None:
    refused = failed(front.serve("a", PROMPT, pooling=pooling, **sampling))
    assert (refused.code, refused.param) == ("invalid_request", "pooling")
    assert said in refused.text


def test_sessions_and_pins_see_such_prompts(front: Frontend) -> None:
    assert front.serve("a", PROMPT, pooling=STATE, session_id="s").pooled == pooled(PROMPT)
    assert front.serve("b", [*PROMPT, 4, 5], pooling=STATE, session_id="s").pooled == pooled([*PROMPT, 4, 5])
    front.loop.check()
