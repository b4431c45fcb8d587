"""Admission by expected answers: what is foreseen, what is learnt, and that everybody is served."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.runtime.headroom import expected
from radixkv.runtime.headroom.expected import ExpectedHeadroom
from radixkv.runtime.headroom.session_answers import SessionAnswer
from radixkv.runtime.request import Phase, Request
from radixkv.settings.tenants import TenantConfig
from radixkv.tree.node import Namespace
from radixkv.wire.kv_budget import most_pages
from support.cases import examples
from support.engine import Engine, prompt
from support.fake_device import expected_output

STOP = tuple(range(100, 1000, 12))
"""Tokens that end an answer after a few dozen tokens."""


def n_pages_foreseen(engine: Engine, n_answer: int) -> int:
    """Steps through the future of running answers of known lengths, with one more of ``n_answer`` tokens.

    They share no pages, and each has its next row already, unless it has its last one. Returns the most pages of
    one token that they need beyond those of then."""
    left = [one.max_tokens - one.n_outputs - one.n_output_placeholders - 1 for one in engine.scheduler.running]
    running = engine.scheduler.running
    own = [min(one.n_known + one.n_output_placeholders + 1, one.n_prompt + one.max_tokens) for one in running]
    most = 0
    for n_steps in range(n_answer + 1):
        growth = sum(n_steps for n_left in left if n_left >= n_steps)
        freed = sum(n_own for n_own, n_left in zip(own, left, strict=True) if n_left < n_steps)
        most = max(most, n_steps + growth - freed)
    return most


@examples(60)
@given(
    running=st.lists(st.tuples(st.integers(1, 30), st.integers(3, 60), st.integers(0, 4)), min_size=1, max_size=8),
    n_answer=st.integers(1, 80),
)
def test_the_future_is_that_of_a_simulation(running: list[tuple[int, int, int]], n_answer: int) -> None:
    """Beyond ``FULL_ROWS`` rows a request needs pages for its whole answer."""
    engine = Engine(4096, 1, max_num_seqs=16, max_num_batched_tokens=512, admission="reserved")
    headroom = ExpectedHeadroom(engine.cache, n_unknown_tokens=0, max_unknown_share=0.0)
    engine.scheduler.running._headroom = engine.scheduler.headroom = headroom
    for number, (n_prompt, max_tokens, n_turns) in enumerate(running):
        engine.add([number, *prompt(n_prompt, number)], max_tokens)
        engine.turn(1 + n_turns)
    newcomer = Request("new", Namespace(), bytearray(8), n_prompt=2, max_tokens=n_answer, order=(0, 99))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expected, "FULL_ROWS", 1)
        assert headroom.n_expected(newcomer) == n_pages_foreseen(engine, n_answer)
    engine.run_to_the_end()


def test_answers_of_known_lengths_hardly_ever_preempt_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """If each is admitted only where all have pages to their ends. Pages come back a step or two after an end, so a
    pool that is full to the last page still preempts now and then."""
    monkeypatch.setattr(expected, "FULL_ROWS", 1)
    n_preemptions = {"expected": 0, "reserved": 0}
    for seed in range(3):
        for admission in n_preemptions:
            random = Random(seed)
            engine = Engine(
                110,
                1,
                max_num_seqs=32,
                max_num_batched_tokens=512,
                num_reserved_decode_tokens=0,
                admission=admission,
            )
            for number in range(random.randint(2, 40)):
                engine.add([number, *prompt(random.randint(1, 40), number)], random.randint(1, 60))
            engine.run_to_the_end()
            n_preemptions[admission] += engine.scheduler.n_preemptions
    assert n_preemptions["expected"] < n_preemptions["reserved"] / 10


@pytest.fixture
def whole_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets requests need pages for their whole answers, however few run."""
    monkeypatch.setattr(expected, "FULL_ROWS", 1)


@pytest.mark.usefixtures("whole_answers")
def test_lengths_that_a_token_ends_are_learnt() -> None:
    """Nothing is foreseen before answers have ended; then so much as they had."""
    engine = Engine(256, 4, max_num_seqs=8, admission="expected")
    headroom = engine.scheduler.headroom
    text = prompt(9, 5)
    length = len(expected_output(Namespace(), text, 200, STOP))
    for _ in range(4):
        newcomer = engine.add(text, max_tokens=200, stop=STOP)
        assert headroom.n_expected(newcomer) == 0
        engine.run()
    last = engine.add(text, max_tokens=200, stop=STOP)
    foreseen = headroom.n_expected(last)
    assert 0 < foreseen <= -(-length // 4)
    engine.run_to_the_end()


@pytest.mark.usefixtures("whole_answers")
def test_a_session_is_learnt_apart() -> None:
    engine = Engine(64, 4, max_num_seqs=1, admission="expected")
    headroom = engine.scheduler.headroom
    found = {}
    for number in range(10):
        name = "long" if number % 2 else "short"
        request = engine.add(prompt(9, number), max_tokens=40, stop=(1 << 20,))
        request.observers = (SessionAnswer((Namespace(), name)),)
        found[name] = headroom.n_expected(request)
        while request.n_outputs < (30 if name == "long" else 4):
            engine.turn()
        engine.abort(request)
        engine.run()
    assert found["long"] > found["short"]


@pytest.mark.nightly
@examples(20)
@given(seed=st.integers(0, 1 << 16), full_rows=st.sampled_from((1, 8, 208)))
def test_everybody_is_served_and_floors_hold(seed: int, full_rows: int) -> None:
    """Random answers, tenants, priorities and forks: nobody waits longer than all would take one after another, and
    a tenant with a floor has its pages, whatever is expected of the others."""
    random = Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expected, "FULL_ROWS", full_rows)
        tenants = [TenantConfig("kept", min_page_share=0.4), TenantConfig("capped", max_page_share=0.6)]
        engine = Engine(
            64,
            4,
            tenants=[*tenants, TenantConfig("flood")],
            max_num_seqs=16,
            max_num_batched_tokens=64,
            schedule_policy=random.choice(("lpm", "fcfs")),
            admission="expected",
        )
        n_tokens = 0
        for _ in range(16):
            tenant = random.choice(("kept", "capped", "flood", "flood"))
            n_prompt, max_tokens, n = random.randint(1, 30), random.randint(1, 60), random.choice((1, 1, 3))
            engine.add(
                prompt(n_prompt, random.randrange(4)),
                max_tokens,
                namespace=Namespace(tenant),
                tenant=tenant,
                stop=random.choice(((), STOP)),
                n=n,
                priority=random.randrange(3),
            )
            n_tokens += n * (n_prompt + max_tokens)
            engine.turn(random.randrange(6))
        engine.run(n_turns=40 + n_tokens)
        engine.check_outputs()
        engine.check_idle()
        for number in range(6):
            engine.add(prompt(20, number), 30, namespace=Namespace("flood"), tenant="flood")
        engine.turn(random.randrange(16))
        kept = engine.add(prompt(12, 9), 8, namespace=Namespace("kept"), tenant="kept")
        engine.turn(2)
        assert kept.phase is not Phase.WAITING, "its floor has room for it"
        engine.run_to_the_end()


def test_an_answer_with_a_budget_needs_no_more_pages_than_it_may_hold() -> None:
    engine = Engine(200, 4, admission="reserved")
    headroom = ExpectedHeadroom(engine.cache, n_unknown_tokens=0, max_unknown_share=0.0)
    engine.scheduler.running._headroom = engine.scheduler.headroom = headroom
    request = engine.add(prompt(20), 400, kv_budget=16)
    newcomer = Request("new", Namespace(), bytearray(8), n_prompt=2, max_tokens=300, order=(0, 99))
    engine.turn(2)
    n_growing = 4 * most_pages(20, 16, 4) - 20
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expected, "FULL_ROWS", 1)
        assert 0 <= headroom.n_expected(newcomer) - engine.cache.pages_for(300 + n_growing) + 1 <= 1
        while request.n_outputs < n_growing + 50:
            engine.turn()
        n_held = len(request.blocks.pages) - request.blocks.n_dropped
        n_foreseen = headroom.n_expected(newcomer) - engine.cache.pages_for(300)
        assert 0 < n_foreseen <= most_pages(20, 16, 4) - n_held + 1, "it has got others for those it has dropped"
    engine.run_to_the_end("length")
