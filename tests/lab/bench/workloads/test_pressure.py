"""The workload of chats that return after all others."""

from itertools import pairwise

import pytest

from radixkv.errors import ConfigError
from radixkv.lab.bench.workloads.base import Source
from radixkv.llm import LLM
from radixkv.wire.sampling import SamplingParams
from support.cases import rest_nightly
from support.sessions import collect_requests, make, said, write_documents


def chats_of(sessions, n_chats):
    """Returns the prompts of each chat, in the order of its turns."""
    prompts = [request.prompt for request in collect_requests(sessions)]
    return [prompts[chat::n_chats] for chat in range(n_chats)]


def test_a_chat_returns_after_all_others_had_a_turn():
    sessions = make("pressure", num_sessions=5, num_turns=3).sessions
    assert [session.first_turn for session in sessions] == [0] * 5 + [1] * 5 + [2] * 5
    chats = chats_of(sessions, 5)
    assert len({chat[0] for chat in chats}) == 5
    for chat in chats:
        for before, after in pairwise(chat):
            assert after.startswith(before)


def test_the_next_turn_has_the_recorded_answer_whatever_the_server_answers():
    sessions = make("pressure", num_sessions=2, num_turns=2, num_questions=3).sessions
    for request in collect_requests(sessions, lambda request: ["nonsense"]):
        assert "nonsense" not in request.prompt
    first, second, *later = collect_requests(sessions)
    for request, returning in zip((first, second), later, strict=True):
        assert (request.prompt.count("Question: "), returning.prompt.count("Question: ")) == (3, 6)
        recorded, *rest = returning.prompt.removeprefix(request.prompt).split("\n\n")
        assert request.check(said(recorded))
        assert not request.check(said(" nonsense"))
        assert len(rest) == 3


def test_a_data_set_gives_documents_questions_and_recorded_answers(tmp_path):
    path = write_documents(tmp_path, (5, 2, 4))
    loaded = make("pressure", Source(0, path), num_sessions=3, num_turns=2, num_questions=2)
    requests = collect_requests(loaded.sessions)
    assert [request.prompt for request in requests[:3]] == [
        f"Text {n}.\n\nQuestion: q{n}.0?\nAnswer: #### a{n}.0\n\nQuestion: q{n}.1?\nAnswer:" for n in range(3)
    ]
    assert [request.prompt[:7] for request in requests[3:]] == ["Text 0.", "Text 2."]
    assert [session.first_turn for session in loaded.sessions] == [0, 0, 0, 1, 1]
    assert loaded.counts == {"missing_questions": 2}
    with pytest.raises(ConfigError, match="has 3 documents; the workload needs 4; .* lower num_sessions"):
        make("pressure", Source(0, path), num_sessions=4)


@pytest.mark.nightly
@pytest.mark.parametrize(("pool_tokens", "returns_to_cache"), rest_nightly([(512, False), (8192, True)], kept=(0,)))
def test_a_pool_that_is_too_small_has_evicted_a_returning_chat(pool_tokens, returns_to_cache):
    requests = collect_requests(make("pressure", num_sessions=10, num_turns=2, num_facts=8).sessions)
    llm = LLM("tiny", max_total_tokens=pool_tokens, max_model_len=512)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    cached = [llm.generate([request.prompt], sampling)[0].num_cached_tokens for request in requests]
    llm.shutdown()
    assert max(cached[:10]) < 16, "other chats share less than a page"
    assert [count > 64 for count in cached[10:]] == [returns_to_cache] * 10
