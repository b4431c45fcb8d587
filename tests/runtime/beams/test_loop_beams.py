"""Beam search in messages of the loop."""

from __future__ import annotations

import gc

import pytest

from radixkv.runtime.request import Request
from radixkv.wire.messages import Failed, PromptPin
from support.fake_device import VOCAB_SIZE, ExpectedBeam, expected_beams
from support.loop_frontend import NAMESPACE, PROMPT, Frontend, done, failed

EOS = frozenset({107, 119})


def expected(width: int, max_tokens: int = 6, length_penalty: float = 1.0) -> list[ExpectedBeam]:
    return expected_beams(NAMESPACE, PROMPT, width, max_tokens, sorted(EOS), length_penalty)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 3.0])
def test_the_choices_are_the_answers_of_the_search_the_best_first(length_penalty: float) -> None:
    front = Frontend(eos_token_ids=EOS)
    front.serve("a", n=4, use_beam_search=True, length_penalty=length_penalty)
    received, answers = front.received["a"], expected(4, length_penalty=length_penalty)
    assert received.tokens == {index: beam.tokens for index, beam in enumerate(answers)}
    assert received.finish_reasons == {index: beam.reason for index, beam in enumerate(answers)}
    n_tokens = sum(len(beam.tokens) for beam in answers)
    assert (done(received).n_prompt_tokens, done(received).n_output_tokens) == (len(PROMPT), n_tokens)
    stats = front.stats()
    assert (stats.prompt_tokens_total, stats.cache_use.n_cached) == (len(PROMPT), 0)
    assert stats.generation_tokens_total == n_tokens


def test_end_tokens_are_ordinary_ones_if_they_are_ignored() -> None:
    front = Frontend(eos_token_ids=EOS)
    front.serve("a", n=3, use_beam_search=True, ignore_eos=True)
    answers = expected_beams(NAMESPACE, PROMPT, 3, 6, (), 1.0)
    assert list(front.received["a"].tokens.values()) == [beam.tokens for beam in answers]


def test_the_width_may_exceed_the_rows_of_a_step() -> None:
    front = Frontend(max_num_seqs=2, n_pages=16)
    front.serve("a", n=12, use_beam_search=True, max_tokens=16)
    answers = expected_beams(NAMESPACE, PROMPT, 12, 16, (), 1.0)
    assert list(front.received["a"].tokens.values()) == [beam.tokens for beam in answers]


def test_other_requests_run_beside_a_search() -> None:
    front = Frontend(eos_token_ids=EOS)
    front.submit("other", max_tokens=12)
    front.serve("a", n=4, use_beam_search=True)
    alone = Frontend(eos_token_ids=EOS)
    alone.submit("other", max_tokens=12)
    alone.run()
    assert front.received["other"].tokens == alone.received["other"].tokens
    assert list(front.received["a"].tokens.values()) == [beam.tokens for beam in expected(4)]


@pytest.mark.parametrize("choice", [None, 1])
@pytest.mark.parametrize("n_turns", [0, 1, 2, 7])
def test_a_cancelled_search_ends_as_a_whole(n_turns: int, choice: int | None) -> None:
    front = Frontend()
    front.submit("a", n=4, use_beam_search=True, max_tokens=16)
    front.turn(n_turns)
    front.cancel("a", choice)
    assert done(front.received["a"]).finish_reason == "abort"
    front.run()
    stats = front.stats()
    assert stats.n_pages_free + stats.n_pages_evictable == front.device.n_pages


def test_the_prompt_of_a_search_counts_and_is_pinned_once_it_is_computed() -> None:
    front = Frontend()
    front.submit("a", n=4, use_beam_search=True, max_tokens=16, pins=[PromptPin(8, 100.0)])
    front.turn(6)
    assert front.stats().prompt_tokens_total == len(PROMPT)
    front.cancel("a")
    assert front.stats().n_pages_pinned == 2


def test_a_search_whose_steps_fail_goes_on_and_one_that_always_fails_ends() -> None:
    front = Frontend(eos_token_ids=EOS)
    front.device.fail_steps.add(2)
    front.serve("a", n=4, use_beam_search=True)
    assert list(front.received["a"].tokens.values()) == [beam.tokens for beam in expected(4)]
    front.device.fail_steps |= set(range(front.stats().steps_total, 1000))
    assert failed(front.serve("b", n=4, use_beam_search=True)).code == "device_error"


def test_the_prompt_of_a_search_is_found_and_pinned_as_others() -> None:
    front = Frontend()
    front.serve("a", n=4, use_beam_search=True, pins=[PromptPin(8, 100.0)])
    assert front.stats().n_pages_pinned == 2
    front.serve("b", n=4, use_beam_search=True)
    assert done(front.received["b"]).cache_use.n_cached == 10
    assert front.received["b"].tokens == front.received["a"].tokens


def test_a_search_needs_as_many_tokens_as_it_is_wide() -> None:
    front = Frontend(eos_token_ids=frozenset(range(VOCAB_SIZE - 7)))
    front.submit("a", n=8, use_beam_search=True)
    assert failed(front.received["a"]).param == "n"
    assert "needs 1001 different next tokens" in failed(front.received["a"]).text


def test_a_refused_request_leaves_no_cycle() -> None:
    """There is no cyclic garbage collector in a server: a refused request must be free as soon as nobody has it."""
    front = Frontend(max_queued_requests=1)
    front.submit("first")
    gc.collect()
    gc.disable()
    try:
        before = sum(type(one) is Request for one in gc.get_objects())
        front.submit("refused", use_beam_search=True, n=2, temperature=0.0, seed=None)
        assert isinstance(front.received["refused"].terminal, Failed)
        assert sum(type(one) is Request for one in gc.get_objects()) == before
    finally:
        gc.enable()
