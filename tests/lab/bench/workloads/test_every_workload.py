"""Properties of every workload."""

import random
from itertools import chain

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from radixkv.errors import ConfigError
from radixkv.lab.bench.flags import OVERRIDES
from radixkv.lab.bench.workloads.base import Source
from radixkv.lab.bench.workloads.catalog import load_workload, workload_names
from support.cases import examples
from support.sessions import collect_requests, collect_turns, comparable_fields, make, said

NAMES = workload_names()
LENGTHS = {"output_len", "num_facts", "block_len", "max_context", "too_long", "history"}
AGENTS = ("agents", "tool-pauses")
"""Workloads whose sessions are as long as the answers say."""
COUNTS = tuple(sorted({*OVERRIDES} - LENGTHS - {"max_concurrency"}))


def sessions_of(name, seed=0):
    return make(name, Source(seed)).sessions


def requests_from(name, seed=0):
    """Returns the requests when answers are arbitrary but reproducible."""
    rng = random.Random(5)

    def answer(request):
        return ["".join(rng.choices('ab1 \n#{}"', k=rng.randint(0, 30))) for _ in range(request.n)]

    return [comparable_fields(request) for request in collect_requests(sessions_of(name, seed), answer)]


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_determines_the_requests(name):
    assert requests_from(name, seed=3) == requests_from(name, seed=3)
    assert requests_from(name, seed=3) != requests_from(name, seed=4)


@pytest.mark.parametrize("name", NAMES)
def test_sessions_can_be_repeated_and_have_n_requests(name):
    for session in sessions_of(name, seed=1):
        first, again = (
            [comparable_fields(request) for turn in collect_turns(session) for request in turn] for _ in range(2)
        )
        assert first == again
        assert 0 < len(first) <= session.n_requests
        assert name in AGENTS or len(first) == session.n_requests
        assert all(collect_turns(session)), "a turn without requests"


@pytest.mark.parametrize("name", NAMES)
def test_a_session_may_end_early(name):
    session = sessions_of(name)[0]
    turns = session.turns()
    next(turns)
    turns.close()
    assert list(map(comparable_fields, next(session.turns()))) == list(
        map(comparable_fields, collect_turns(session)[0])
    )


@pytest.mark.parametrize("name", sorted({*NAMES} - {"chat", "trace", *AGENTS}))
def test_no_question_is_repeated_except_for_sampling(name):
    """Chats and tool tasks may begin with the same message."""
    requests = collect_requests(sessions_of(name))
    assert len({(request.prompt, request.seed) for request in requests}) == len(requests)
    assert all((request.seed is None) == (request.temperature == 0) for request in requests)


@pytest.mark.parametrize("name", sorted({*NAMES} - {"trace"}))
def test_checks_reject_wrong_answers(name):
    """Correct answers are tested in the tests of each workload."""
    requests = collect_requests(sessions_of(name))
    checks = [request.check for request in requests if request.check is not None]
    assert len(checks) >= len(requests) // 4
    assert not any(
        check(said(text)) for check in checks for text in ("", "#### 0.123", "{}", "#### nobody", "{" * 5000)
    )


@pytest.mark.parametrize("name", ["chat", "multiturn"])
def test_prompts_with_recorded_answers_do_not_depend_on_the_model(name):
    sessions = make(name, history="recorded").sessions
    quiet, loud = (
        list(map(comparable_fields, collect_requests(sessions, lambda _, text=text: [text])))
        for text in ("", "What?\n\nNever.")
    )
    assert quiet == loud
    assert any(turn > 0 for session in sessions for turn, _ in enumerate(collect_turns(session)))


@examples(100)
@given(st.data())
def test_any_parameters_and_any_answers_give_sessions_with_n_requests(data):
    name = data.draw(st.sampled_from(NAMES))
    fields = load_workload(name).__struct_fields__
    changes = {count: data.draw(st.integers(1, 5), count) for count in COUNTS if count in fields}
    try:
        workload = load_workload(name, **changes)
    except ConfigError:  # beam above width, or chunks above documents
        assume(False)
    loaded = workload.make(Source(data.draw(st.integers(0, 2**64))))
    sessions = loaded.sessions
    expected = msgspec.structs.asdict(workload)
    groups = expected.get("num_sessions") or expected.get("num_documents") or expected["num_prompts"]
    split = {"long-document-qa": "num_questions", "pressure": "num_turns", "rag": "num_questions"}
    assert len(sessions) == groups * (expected[split[name]] if name in split else 1)
    for session in sessions:
        answers = data.draw(st.lists(st.text(), min_size=1, max_size=5))
        turns = collect_turns(session, lambda request, answers=answers: (answers * 8)[: request.n])
        assert name in AGENTS or sum(map(len, turns)) == session.n_requests
        for request in chain.from_iterable(turns):
            assert request.check is None or request.check(said(*(answers * 8)[: request.n])) in (False, True)
