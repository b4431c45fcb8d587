"""Rows with drafts: the same answers in fewer steps, and the same pages in the tree."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from radixkv.runtime.request import GREEDY
from radixkv.runtime.step.plan import RowSampling
from support.engine import Engine, name_of

SAMPLED = replace(GREEDY, temperature=1.0, seed=3, n_logprobs=1)
STOP = tuple(range(105, 1000, 25))
PROMPTS = [[n, *range(1, 1 + 5 * n)] for n in range(1, 9)]


def run_engine(prompts: list[list[int]] = PROMPTS, *, drafts: bool = True, **options: Any) -> Engine:
    engine = Engine(400, 4)
    engine.drafts.is_on = drafts
    for prompt in prompts:
        engine.add(prompt, 40, **options)
    engine.run()
    engine.check_outputs()
    engine.check_idle()
    return engine


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("options", [{}, {"n": 3}, {"stop": STOP}, {"stop": STOP, "min_tokens": 20}])
def test_answers_are_the_same_in_fewer_steps(sampling: RowSampling, options: dict[str, Any]) -> None:
    plain = run_engine(drafts=False, sampling=sampling, **options)
    drafted = run_engine(sampling=sampling, **options)
    assert drafted.ended == plain.ended
    assert drafted.logprobs == plain.logprobs
    assert 0 < drafted.drafts.n_accepted < drafted.drafts.n_drafted
    if not options:
        assert len(drafted.device.executed) < 0.7 * len(plain.device.executed)


@pytest.mark.parametrize("options", [{}, {"stop": STOP}])
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
