"""Sessions: what a conversation will not continue is evicted first, with a fake device and a fake copier."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from radixkv.runtime.lifetimes import sessions
from radixkv.runtime.lifetimes.commands import end_of_adapter
from radixkv.runtime.request import GREEDY, Request
from radixkv.tree.node import Namespace
from support.engine import Engine, prompt, token_bytes
from support.fake_device import unpack

DEFAULT = Namespace()
SEEDED = replace(GREEDY, temperature=1.0, seed=3)


def serve(engine: Engine, tokens: list[int], session_id: str = "a", **options: Any) -> list[int]:
    """Serves a turn; returns its prompt and answer."""
    request = engine.serve(tokens, session_id=session_id, **options)
    return all_tokens(request)


def all_tokens(request: Request) -> list[int]:
    return unpack(bytes(request.known_key))


def close(engine: Engine, session_id: str = "a", namespace: Namespace = DEFAULT) -> tuple[int, int] | None:
    return engine.sessions.close(namespace, session_id)


def is_demoted(engine: Engine, tokens: list[int], namespace: Namespace = DEFAULT) -> bool:
    return engine.cache.tree.demotions.reach_end(namespace, token_bytes(tokens))


def evict(engine: Engine, n_pages: int) -> None:
    """Evicts pages of the device."""
    blocks = engine.cache.open(DEFAULT, b"", bypasses_tree=True)
    assert engine.cache.reserve(blocks, engine.cache.n_free + n_pages)
    engine.cache.close(blocks)


def test_a_closed_session_is_evicted_first() -> None:
    engine = Engine(n_pages=64)
    old = serve(engine, prompt(20, first=2), "old")
    new = serve(engine, prompt(20), "new")
    assert close(engine, "new") == [5]
    assert engine.n_cached(new) == 20, "it is found until it is evicted"
    evict(engine, 5)
    assert (engine.n_cached(old), engine.n_cached(new)) == (20, 0)


@pytest.mark.parametrize("max_num_seqs", [2, 8])
def test_all_answers_of_a_beam_search_are_demoted(max_num_seqs: int) -> None:
    """With fewer rows than beams, most beams hold no pages when the search ends."""
    engine = Engine(n_pages=64, max_num_seqs=max_num_seqs)
    leader = engine.serve(prompt(20), max_tokens=9, n=6, is_beam_search=True, session_id="a")
    assert close(engine) is not None
    answers = [all_tokens(choice) for choice in engine.siblings[leader.id]]
    assert [is_demoted(engine, answer[:28]) for answer in answers] == [True] * 6


def test_what_the_first_turn_found_is_not_demoted() -> None:
    engine = Engine(n_pages=64)
    shared = prompt(16)
    engine.serve([*shared, 1, 2, 3, 4])
    first = serve(engine, [*shared, 5, 6, 7, 8])
    serve(engine, [*first, 9, 9, 9, 9])
    assert close(engine) == [3]
    assert not is_demoted(engine, shared)
    assert is_demoted(engine, first)


def test_a_first_turn_that_is_cached_as_a_whole_demotes_only_its_answer() -> None:
    engine = Engine(n_pages=64)
    engine.serve(prompt(16), max_tokens=1)
    whole = serve(engine, prompt(16), max_tokens=9)
    assert close(engine) == [2]
    assert not is_demoted(engine, prompt(16))
    assert is_demoted(engine, whole)


def test_a_page_of_which_the_first_turn_found_a_part_is_demoted() -> None:
    engine = Engine(n_pages=64, page_size=8)
    engine.serve(prompt(16))
    other = prompt(16)
    other[15] += 1
    turn = engine.serve([*other, 5], session_id="a", max_tokens=1)
    assert (turn.cache_use.counted.n_cached, turn.cache_use.counted.n_copied) == (15, 7)
    assert close(engine) == [1]
    assert is_demoted(engine, other)
    assert not is_demoted(engine, prompt(16))


def test_a_turn_that_continues_the_last_one_demotes_nothing() -> None:
    engine = Engine(n_pages=64)
    first = serve(engine, prompt(20))
    second = serve(engine, [*first, 1, 2, 3, 4])
    assert not is_demoted(engine, first)
    assert not is_demoted(engine, second)


def test_an_answer_that_was_asked_for_again_is_superseded() -> None:
    engine = Engine(n_pages=64)
    first = serve(engine, prompt(20), max_tokens=9)
    second = serve(engine, [*prompt(16), 7, 7, 7, 7], max_tokens=9)
    assert is_demoted(engine, first)
    assert not is_demoted(engine, prompt(16))
    assert not is_demoted(engine, second)
    third = serve(engine, first)
    assert not is_demoted(engine, first), "it was used again"
    assert is_demoted(engine, second)
    assert close(engine) == [len(third) // 4]


def test_turns_at_the_same_time_do_not_supersede_each_other() -> None:
    engine = Engine(n_pages=64)
    parts = [engine.add([*prompt(16), *[last] * 8], session_id="a", max_tokens=last) for last in (1, 5)]
    engine.run()
    ends = [all_tokens(part) for part in parts]
    assert not any(is_demoted(engine, end) for end in ends)
    serve(engine, ends[1])
    assert [is_demoted(engine, end) for end in ends] == [True, False]
    serve(engine, ends[0])
    assert [is_demoted(engine, end) for end in ends] == [False, True]


def test_all_choices_of_a_turn_are_kept_until_the_next_one() -> None:
    engine = Engine(n_pages=64)
    request = engine.serve(prompt(20), n=2, max_tokens=9, session_id="a", sampling=SEEDED)
    ends = [all_tokens(choice) for choice in engine.siblings[request.id]]
    assert ends[0] != ends[1]
    assert not any(is_demoted(engine, end) for end in ends)
    serve(engine, ends[0])
    assert [is_demoted(engine, end) for end in ends] == [False, True]
    assert not is_demoted(engine, prompt(20))


def test_a_page_of_several_choices_counts_once_when_it_is_demoted() -> None:
    engine = Engine(n_pages=64)
    engine.serve(prompt(20), n=2, max_tokens=9, session_id="a", sampling=SEEDED)
    assert close(engine) == [engine.cache.tree.n_pages_reachable]


def test_a_turn_that_runs_while_its_session_is_closed_is_demoted_at_its_end() -> None:
    engine = Engine(n_pages=64, n_slots=64)
    request = engine.add(prompt(20), max_tokens=9, session_id="a")
    engine.turn(3)
    assert close(engine) == [0, 0]
    engine.run()
    engine.store_all()
    whole = all_tokens(request)
    assert is_demoted(engine, whole)
    assert engine.host.tree.demotions.reach_end(DEFAULT, token_bytes(whole))
    assert close(engine) is None


def test_the_host_tier_demotes_too_also_what_is_stored_later() -> None:
    engine = Engine(n_pages=64, n_slots=64, finishes_copies=False)
    old = serve(engine, prompt(20, first=2), "old", max_tokens=9)
    engine.store_all()
    new = serve(engine, prompt(20), "new", max_tokens=9)
    assert close(engine, "new")[0] == 7
    engine.store_all()
    assert engine.n_in_host(new) == 28
    assert engine.host.tree.demotions.reach_end(DEFAULT, token_bytes(new))
    blocks = engine.host.open(DEFAULT, b"", bypasses_tree=True)
    assert engine.host.reserve(blocks, engine.host.n_free + 7)
    engine.host.close(blocks)
    assert (engine.n_in_host(old), engine.n_in_host(new)) == (28, 0)


def test_an_offer_of_what_is_stored_already_does_not_end_its_demotion() -> None:
    engine = Engine(n_pages=64, n_slots=64)
    request = engine.add(prompt(20), max_tokens=4, session_id="a")
    for _ in range(3):
        engine.turn()
        while engine.host_tier.is_busy or engine.host_tier.n_offers:
            engine.finish_copies()
            engine.host_tier.advance()
    assert engine.n_in_host(prompt(20)) == 20
    close(engine)
    engine.run()
    engine.store_all()
    for tree in (engine.cache.tree, engine.host.tree):
        assert tree.demotions.reach_end(DEFAULT, bytes(request.known_key))


def test_another_request_that_goes_on_from_a_closed_session_is_not_demoted() -> None:
    engine = Engine(n_pages=64, n_slots=64)
    first = serve(engine, prompt(20), max_tokens=9)
    engine.store_all()
    close(engine)
    request = engine.add([*first, *prompt(12, first=3)], max_tokens=30)
    engine.turn(10)
    engine.store_all()
    going_on = all_tokens(request)
    assert engine.n_in_host(going_on) >= 40
    assert not engine.host.tree.demotions.reach_end(DEFAULT, token_bytes(going_on))
    engine.run()
    engine.store_all()
    whole = all_tokens(request)
    for tree in (engine.cache.tree, engine.host.tree):
        assert not tree.demotions.reach_end(DEFAULT, token_bytes(whole))


def test_ids_belong_to_a_salt() -> None:
    engine = Engine(n_pages=64)
    salted = Namespace(salt="hers")
    serve(engine, prompt(20), namespace=salted)
    assert close(engine) is None
    assert close(engine, namespace=salted) == [5]
    assert close(engine, namespace=salted) is None


def test_an_aborted_turn_counts_once_it_has_an_answer() -> None:
    engine = Engine(n_pages=64)
    first = serve(engine, prompt(20), max_tokens=9)
    request = engine.add([*prompt(16), 7, 7, 7, 7], session_id="a", max_tokens=20)
    engine.turn()
    engine.abort(request)
    engine.run()
    assert not is_demoted(engine, first)
    request = engine.add([*prompt(16), 7, 7, 7, 7], session_id="a", max_tokens=20)
    engine.turn(5)
    engine.abort(request)
    engine.run()
    assert is_demoted(engine, first)


def test_the_oldest_sessions_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    engine = Engine(n_pages=64)
    for name in "abcad":
        serve(engine, prompt(8, first=ord(name)), name)
    assert [name for name in "abcd" if close(engine, name) is not None] == ["a", "c", "d"]
    monkeypatch.setattr(sessions, "MAX_SESSION_TOKENS", 30)
    for name in "abc":
        serve(engine, prompt(8, first=ord(name)), name)
    assert [name for name in "abc" if close(engine, name) is not None] == ["b", "c"]
    serve(engine, prompt(40), "d")
    assert close(engine, "d") is None, "it is longer than the limit"
    serve(engine, prompt(8), "e")
    assert close(engine, "e") is not None


def test_a_turn_whose_session_was_forgotten_keeps_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 1)
    engine = Engine(n_pages=64)
    engine.serve(prompt(16))
    first = engine.add([*prompt(16), 1, 2, 3, 4], session_id="a")
    engine.turn()
    engine.abort(engine.add(prompt(8), session_id="b"))
    engine.serve(prompt(8, first=9), session_id="a", max_tokens=20)
    assert close(engine) is not None
    assert not is_demoted(engine, prompt(16))
    assert is_demoted(engine, all_tokens(first))


def test_the_sessions_of_an_adapter_that_is_freed_are_closed() -> None:
    """Nobody can name them any more. Those of the model and of other adapters go on."""
    engine, left = Engine(n_pages=64), list[tuple[Namespace, str]]()
    spaces = [Namespace(adapter=adapter) for adapter in ("", "sql", "law")]
    turns = [serve(engine, prompt(20, first=n), namespace=space) for n, space in enumerate(spaces, 2)]
    end_of_adapter(engine.pins, engine.sessions, "sql", leave=lambda *session: left.append(session))
    assert left == [(spaces[1], "a")]
    assert [is_demoted(engine, *one) for one in zip(turns, spaces, strict=True)] == [False, True, False]
    assert [close(engine, namespace=space) is None for space in spaces] == [False, True, False]
