"""Rows with drafts: the same answers in fewer steps, and the same pages in the tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace

from radixkv.runtime.request import GREEDY, Request
from radixkv.runtime.step.plan import RowSampling
from radixkv.tree.node import Namespace
from support.cases import rest_nightly
from support.engine import Engine, name_of, token_bytes
from support.fake_device import expected_output
from support.fake_drafts import FakeDrafts
from support.fake_grammars import END, FakeGrammar

SAMPLED = replace(GREEDY, temperature=1.0, seed=3, n_logprobs=1)
LONG = FakeGrammar(7, 35)
STOP = tuple(range(105, 1000, 25))
PROMPTS = [[n, *range(1, 1 + 5 * n)] for n in range(1, 9)]


@dataclass
class OneGuess(FakeDrafts):
    """Drafts the same tokens in each step, or what remains of them after the output."""

    guess: Sequence[int] = ()
    is_of_whole_output: bool = False

    def _draft(self, request: Request, max_drafts: int) -> bytes:
        first = request.n_outputs if self.is_of_whole_output else 0
        return token_bytes(self.guess[first : first + max_drafts])


def run_engine(prompts: list[list[int]] = PROMPTS, *, drafts: bool = True, **options: Any) -> Engine:
    engine = Engine(400, 4)
    engine.drafts.is_on = drafts
    for prompt in prompts:
        engine.add(prompt, 40, **options)
    engine.run()
    engine.check_outputs()
    engine.check_idle()
    return engine


OPTIONS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"stop": STOP, "min_tokens": 20},
    {"stop": STOP},
    {"grammar": LONG},
    {"grammar": FakeGrammar(3, 20), "stop": (END,), "min_tokens": 30},
    {"grammar": LONG, "n": 3, "stop": STOP, "min_tokens": 20},
]


@pytest.mark.parametrize(("options", "sampling"), rest_nightly(product(OPTIONS, [GREEDY, SAMPLED]), kept=(1,)))
def test_answers_are_the_same_in_fewer_steps(sampling: RowSampling, options: dict[str, Any]) -> None:
    plain = run_engine(drafts=False, sampling=sampling, **options)
    drafted = run_engine(sampling=sampling, **options)
    assert drafted.ended == plain.ended
    assert drafted.logprobs == plain.logprobs
    assert 0 < drafted.drafts.n_accepted < drafted.drafts.n_drafted
    if not options:
        assert len(drafted.device.executed) < 0.7 * len(plain.device.executed)


@pytest.mark.parametrize("options", rest_nightly([{}, {"stop": STOP}, {"grammar": LONG}], kept=(1, 2)))
def test_requests_one_by_one_find_the_same_pages(options: dict[str, Any]) -> None:
    engines = [Engine(400, 4), Engine(400, 4)]
    engines[1].drafts.is_on = True
    for prompt in [*PROMPTS, *PROMPTS]:
        requests = [engine.serve(prompt, 30, **options) for engine in engines]
        answers = [engine.output(request) for engine, request in zip(engines, requests, strict=True)]
        found = [
            (request.cache_use.counted, engine.n_cached([*prompt, *answer]), engine.cache.n_available)
            for engine, request, answer in zip(engines, requests, answers, strict=True)
        ]
        assert found[0] == found[1]
    assert engines[1].drafts.n_accepted


def test_a_request_that_counts_its_tokens_has_no_drafts() -> None:
    engine = run_engine(sampling=replace(GREEDY, temperature=1.0, frequency_penalty=0.5))
    assert not engine.drafts.n_drafted


def test_drafts_evict_nothing_and_take_no_promised_page() -> None:
    engine = Engine(24, 4)
    engine.serve(range(1, 60), 4)  # the tree has most pages then
    n_evicted, n_free = engine.cache.n_evicted, engine.cache.n_free
    engine.drafts.is_on = True
    request = engine.add([1000, 1001], 12)
    while name_of(request) not in engine.ended:
        engine.turn()
        assert engine.cache.n_evicted == n_evicted
    assert engine.drafts.n_drafted
    assert engine.cache.n_free <= n_free


@pytest.mark.parametrize(("page_size", "n_most"), [(1, 0), (4, 3)])
def test_no_step_waits_for_drafts_that_get_no_page(page_size: int, n_most: int) -> None:
    """Each page that is evicted is for the next token."""
    engine = Engine(24, page_size, drafts=OneGuess(is_on=True, guess=[7] * 10))
    engine.serve(range(1, 24 * page_size - 2), 4)
    request = engine.add([1000, 1001], 12)
    n_drafts, n_waited = [], 0
    while name_of(request) not in engine.ended:
        plan = engine.launch()
        n_drafts.append(plan.n_drafts if plan else 0)
        n_waited += engine.scheduler.wants_results
        engine.collect()
    assert max(n_drafts) == n_most
    assert (n_waited > 0) == (n_most > 0)


def test_no_step_waits_for_drafts_while_all_free_pages_are_promised() -> None:
    """A page of one token has no room for a draft, so that a draft needs another page."""
    engine = Engine(24, 1, drafts=OneGuess(is_on=True, guess=[7] * 10))
    engine.add([1000, 1001], 12)
    engine.launch()
    waits = []
    for n_promised in (0, engine.cache.n_free - 1, engine.cache.n_free, engine.cache.n_free + 1):
        engine.scheduler.tiers.n_promised = n_promised
        waits.append(engine.scheduler.wants_results)
    assert waits == [True, True, False, False]


def test_an_abort_frees_the_pages_of_drafts_in_flight() -> None:
    engine = Engine(64, 4)
    engine.drafts.is_on = True
    request = engine.add(range(1, 30), 60)
    for _ in range(100):
        plan = engine.launch()
        if plan is not None and plan.n_drafts:
            break
        engine.collect()
    else:
        raise AssertionError("there are no drafts")
    engine.abort(request)
    engine.collect()
    engine.check_idle()
    assert not engine.drafts.n_accepted


def test_a_grammar_has_only_the_tokens_of_the_output_between_steps() -> None:
    """It follows drafts while masks are filled, and takes them back: a draft is not accepted twice."""
    engine = Engine(400, 4)
    engine.drafts.is_on = True
    request = engine.add(range(1, 12), 40, grammar=LONG)
    while name_of(request) not in engine.ended:
        engine.launch()
        assert engine.sample_step()
        assert request.constraint.output == engine.output(request)
        engine.collect()
        assert request.constraint.output == engine.output(request)
    assert 0 < engine.drafts.n_accepted < engine.drafts.n_drafted
    engine.check_outputs()


@pytest.mark.parametrize("stop", [(), (END,)])
def test_drafts_behind_the_end_of_a_grammar_are_not_accepted(stop: tuple[int, ...]) -> None:
    """Their positions have no mask, and the device may sample just what was drafted there."""
    prompt, grammar = list(range(1, 12)), FakeGrammar(3, 6)
    output = expected_output(Namespace(), prompt, 40, grammar=grammar)
    behind = expected_output(Namespace(), prompt + output, 20)
    drafts = OneGuess(is_on=True, guess=output + behind, is_of_whole_output=True)
    drafting, plain = Engine(400, 4, drafts=drafts), Engine(400, 4)
    found = []
    for engine in (drafting, plain):
        request = engine.serve(prompt, 40, grammar=grammar, stop=stop)
        engine.check_outputs()
        engine.check_idle()
        n_cached = engine.n_cached(prompt + output + behind)
        found.append((engine.ended[name_of(request)], n_cached, engine.cache.n_available))
    assert found[0] == found[1]
    assert drafts.n_drafted > len(output)
    assert drafts.n_accepted == len(output) - 2, "all but the first, which the prompt samples, and the end"


def test_nothing_is_accepted_behind_a_draft_that_the_grammar_forbids() -> None:
    """The second draft is what would be sampled, without a mask, if the first one were allowed."""
    prompt, grammar = list(range(1, 12)), FakeGrammar(3, 20)
    (first,) = expected_output(Namespace(), prompt, 1, grammar=grammar)
    forbidden = next(token for token in range(100, 1000) if token not in grammar.allowed([first]))
    behind = expected_output(Namespace(), [*prompt, first, forbidden], 3)
    drafts = OneGuess(is_on=True, guess=[forbidden, *behind])
    engine = Engine(400, 4, drafts=drafts)
    engine.serve(prompt, 12, grammar=grammar)
    engine.check_outputs()
    engine.check_idle()
    assert drafts.n_drafted > drafts.n_accepted == 0


@pytest.mark.parametrize("n_accepted", [1, 2, 3])
def test_a_request_whose_grammar_rejects_what_its_mask_allows_fails_alone(n_accepted: int) -> None:
    """Also at a draft behind accepted ones, whose tokens the request keeps."""
    engine = Engine(400, 4)
    engine.drafts.is_on = True
    grammar = FakeGrammar(3, 12, n_accepted=n_accepted)
    failing = [engine.add([n, 8, 9], 20, grammar=grammar) for n in range(6)]
    other = engine.add(range(1, 12), 20, grammar=FakeGrammar(3, 12))
    engine.run()
    assert {engine.ended[name_of(one)].reason for one in failing} == {"grammar_error"}
    assert {one.n_outputs for one in failing} == {n_accepted}
    assert engine.ended[name_of(other)].reason == "stop"
    engine.check_idle()
