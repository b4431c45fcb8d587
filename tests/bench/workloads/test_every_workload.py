"""What holds for every kind."""

import random
from itertools import chain

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from radixkv.bench.workloads.catalog import WorkloadChanges, load_workload, workload_names
from radixkv.bench.workloads.source import Source
from radixkv.errors import ConfigError
from support.sessions import facts_of, requests_of, turns_of

NAMES = workload_names()
LENGTHS = {"output_len", "num_facts", "block_len", "max_context", "too_long"}
COUNTS = tuple(sorted({*WorkloadChanges.__struct_fields__} - LENGTHS - {"max_concurrency"}))


def made(name, seed=0):
    return load_workload(name).make(Source(seed)).sessions


def asked(name, seed=0):
    """What is asked when answers are arbitrary, but the same each time."""
    rng = random.Random(5)

    def answer(request):
        return ["".join(rng.choices('ab1 \n#{}"', k=rng.randint(0, 30))) for _ in range(request.n)]

    return [facts_of(request) for request in requests_of(made(name, seed), answer)]


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides_what_is_asked(name):
    assert asked(name, seed=3) == asked(name, seed=3)
    assert asked(name, seed=3) != asked(name, seed=4)


@pytest.mark.parametrize("name", NAMES)
def test_sessions_begin_anew_and_are_as_long_as_they_say(name):
    for session in made(name, seed=1):
        first, again = ([facts_of(request) for turn in turns_of(session) for request in turn] for _ in range(2))
        assert first == again
        assert len(first) == session.n_requests > 0
        assert all(turns_of(session)), "a turn without requests"


@pytest.mark.parametrize("name", NAMES)
def test_a_session_may_end_early(name):
    session = made(name)[0]
    turns = session.turns()
    next(turns)
    turns.close()
    assert list(map(facts_of, next(session.turns()))) == list(map(facts_of, turns_of(session)[0]))


@pytest.mark.parametrize("name", sorted({*NAMES} - {"chat", "agents", "trace"}))
def test_no_question_is_asked_twice_but_to_sample_again(name):
    """Chats and errands may begin alike, as in life."""
    requests = requests_of(made(name))
    assert len({(request.prompt, request.seed) for request in requests}) == len(requests)
    assert all((request.seed is None) == (request.temperature == 0) for request in requests)


@pytest.mark.parametrize("name", sorted({*NAMES} - {"trace"}))
def test_all_that_has_a_right_answer_tells_it_from_a_wrong_one(name):
    """The right answers are tested kind by kind."""
    requests = requests_of(made(name))
    checks = [request.is_right for request in requests if request.is_right is not None]
    assert len(checks) >= len(requests) // 4
    assert not any(
        check([text]) for check in checks for text in ("", "#### 0.123", "{}", "#### nobody", "{" * 5000)
    )


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_parameters_and_any_answers_make_sessions_as_long_as_they_say(data):
    name = data.draw(st.sampled_from(NAMES))
    fields = load_workload(name).__struct_fields__
    changes = {count: data.draw(st.integers(1, 5), count) for count in COUNTS if count in fields}
    try:
        workload = load_workload(name, WorkloadChanges(**changes))
    except ConfigError:  # a search that keeps more than it has
        assume(False)
    made = workload.make(Source(data.draw(st.integers(0, 2**64))))
    sessions = made.sessions
    expected = msgspec.structs.asdict(workload)
    groups = expected.get("num_sessions") or expected.get("num_documents") or expected["num_prompts"]
    assert len(sessions) == groups * (expected["num_questions"] if name == "long-document-qa" else 1)
    for session in sessions:
        answers = data.draw(st.lists(st.text(), min_size=1, max_size=5))
        turns = turns_of(session, lambda request, answers=answers: (answers * 8)[: request.n])
        assert sum(map(len, turns)) == session.n_requests
        for request in chain.from_iterable(turns):
            assert request.is_right is None or request.is_right((answers * 8)[: request.n]) in (False, True)
