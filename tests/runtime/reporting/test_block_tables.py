"""``GetTables`` of requests that share, fork, wait and end; ``check_tables`` compares all of them with counts."""

from __future__ import annotations

import pytest

from radixkv.runtime.reporting import block_tables
from radixkv.runtime.reporting.block_tables import make_tables
from radixkv.wire.messages import MAX_FRAME_BYTES, encode
from radixkv.wire.structured_outputs import StructuredOutputs
from radixkv.wire.table_messages import GetTables, RequestTables, Tabled, TablePage
from support.engine import MESSAGE_ENDS, Engine, prompt
from support.fake_grammars import FakeCompiler
from support.loop_frontend import Frontend

PAGE_SIZE = 4
SHARED = prompt(16, 1)


def tabled(front: Frontend, *requests: str, first: int = 0) -> Tabled:
    (reply,) = front.loop.receive(GetTables("t", requests, first))
    assert isinstance(reply, Tabled), reply
    front.loop.check()
    return reply


def of_engine(engine: Engine, *requests: str) -> Tabled:
    return make_tables(engine.scheduler, GetTables("t", requests), engine.siblings.values())


def physical(request: RequestTables, choice: int = 0) -> list[int | None]:
    return [page.page for page in request.choices[choice].pages]


def test_two_requests_have_the_pages_of_their_common_prefix() -> None:
    front = Frontend()
    front.submit("a", [*SHARED, 1, 2, 3], max_tokens=20)
    front.turn(2)
    front.submit("b", [*SHARED, 4, 5], max_tokens=20)
    front.turn(2)
    a, b = tabled(front, "a", "b").requests
    assert (a.id, b.id) == ("a", "b")
    assert physical(a)[:4] == physical(b)[:4]
    assert not {*physical(a)[4:]} & {*physical(b)[4:]}
    for request in (a, b):
        (table,) = request.choices
        assert [page.n_refs for page in table.pages] == [2, 2, 2, 2, *[1] * (table.n_pages - 4)]
        assert (table.phase, table.n_shared, table.n_own) == ("running", 4, 1)
        assert table.pages[-1].kind == "own"
        assert table.pages[-1].n_filled == table.n_stored - (table.n_pages - 1) * PAGE_SIZE
    front.run()
    after = tabled(front)
    assert after.requests == ()
    assert (after.pool.n_leased, after.pool.n_own) == (0, 0)
    assert after.pool.n_free + after.pool.n_cached == after.pool.n_pages


def test_each_choice_has_a_table_with_the_prompts_pages() -> None:
    front = Frontend()
    front.submit("a", [*SHARED, 9], max_tokens=8, n=3)
    front.turn()
    (before,) = tabled(front, "a").requests
    assert [choice.phase for choice in before.choices] == ["running", "following", "following"]
    assert [len(choice.pages) for choice in before.choices] == [5, 0, 0]
    front.turn(2)
    (request,) = tabled(front, "a").requests
    assert [choice.choice for choice in request.choices] == [0, 1, 2]
    assert {choice.phase for choice in request.choices} == {"running"}
    assert len({tuple(physical(request, choice)[:4]) for choice in range(3)}) == 1
    assert len({physical(request, choice)[4] for choice in range(3)}) == 3, "each has copied the part of a page"
    assert all(page.n_refs == 3 for choice in request.choices for page in choice.pages[:4])


def test_a_request_without_pages_says_why() -> None:
    front = Frontend(max_num_seqs=1)
    front.grammars.is_immediate = False
    front.submit("a", SHARED, max_tokens=8)
    front.turn()
    front.submit("b", SHARED, max_tokens=8)
    front.submit("c", SHARED, max_tokens=8, structured_outputs=StructuredOutputs(regex="3 2 1"))
    a, b, c = tabled(front).requests
    assert [one.choices[0].phase for one in (a, b, c)] == ["running", "waiting", "gated"]
    assert [one.choices[0].n_pages for one in (b, c)] == [0, 0]
    assert [one.choices[0].pages for one in (a, b, c)] == [(), (), ()], "counts only"


def test_requests_that_have_ended_and_unknown_ones_are_left_out() -> None:
    front = Frontend()
    front.serve("a", SHARED, max_tokens=2)
    front.submit("b", SHARED, max_tokens=9)
    front.turn()
    assert [one.id for one in tabled(front, "a", "nobody", "b").requests] == ["b"]
    assert tabled(front, "a").requests == ()


def test_tables_are_told_from_an_entry_on() -> None:
    front = Frontend()
    front.submit("a", SHARED, max_tokens=8)
    front.turn()
    (whole,) = tabled(front, "a").requests
    (part,) = tabled(front, "a", first=2).requests
    (beyond,) = tabled(front, "a", first=1 << 30).requests
    assert part.choices[0].pages == whole.choices[0].pages[2:]
    assert beyond.choices[0].pages == ()
    assert part.choices[0].n_pages == beyond.choices[0].n_pages == whole.choices[0].n_pages


def test_an_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_tables, "MAX_LISTED_CHOICES", 5)
    monkeypatch.setattr(block_tables, "MAX_SHOWN_PAGES", 6)
    monkeypatch.setattr(block_tables, "MIN_SHOWN_PAGES", 2)
    front = Frontend(n_pages=256)
    for name in "abcd":
        front.submit(name, prompt(16, ord(name)), max_tokens=8, n=2)
    front.turn(3)
    listed = tabled(front)
    assert [one.id for one in listed.requests] == ["a", "b"], "no request is told in part"
    assert listed.n_more == 2
    (shown,) = tabled(front, "a").requests
    assert [len(choice.pages) for choice in shown.choices] == [3, 3]
    assert [len(choice.pages) for one in tabled(front, "a", "b").requests for choice in one.choices] == [2] * 4


def test_the_longest_answer_fits_a_frame() -> None:
    page = TablePage(2**31, 2**31, 2**16, "loading", 2**16, "storage", 2**31, 2**31)
    n_pages = max(block_tables.MAX_SHOWN_PAGES, block_tables.MIN_SHOWN_PAGES * block_tables.MAX_LISTED_CHOICES)
    assert n_pages * len(encode(page)) < MAX_FRAME_BYTES / 8


def test_pages_behind_the_window_are_freed() -> None:
    engine = Engine(64, PAGE_SIZE, shares=False, window=6)
    request = engine.add(prompt(8), max_tokens=20)
    engine.turn(12)
    (told,) = of_engine(engine, request.id).requests
    (table,) = told.choices
    assert table.n_freed > 0
    assert [page.kind for page in table.pages] == ["freed"] * table.n_freed + ["own"] * table.n_own
    assert all(page.page is None for page in table.pages[: table.n_freed])
    engine.run()


def test_pages_of_the_tree_that_an_answer_skips_are_told() -> None:
    engine = Engine(64, PAGE_SIZE)
    request = engine.add(prompt(24), max_tokens=20, kv_budget=12)
    engine.turn(6)
    (told,) = of_engine(engine, request.id).requests
    (table,) = told.choices
    skipped = [page.entry for page in table.pages if page.kind == "skipped"]
    assert skipped == sorted(request.block_table.skipped)
    assert len(skipped) == table.n_skipped > 0
    assert all(page.page is not None for page in table.pages)
    engine.run()


def test_window_pages_are_those_of_the_window() -> None:
    engine = Engine(64, PAGE_SIZE, mixed_window=6, n_states=8)
    request = engine.add(prompt(20), max_tokens=12)
    engine.turn(8)
    (told,) = of_engine(engine, request.id).requests
    (table,) = told.choices
    in_window = [page.window_page is not None for page in table.pages]
    assert in_window == sorted(in_window), "they are the last ones"
    assert 0 < sum(in_window) == table.n_window_pages < table.n_pages
    assert of_engine(engine).pool.n_replaced >= 0
    engine.run()


def test_states_are_after_the_pages_at_whose_end_the_tree_has_them() -> None:
    engine = Engine(64, PAGE_SIZE, n_states=8)
    head = [*(token for token in prompt(30) if token not in MESSAGE_ENDS)][:15]
    engine.serve([*head, 3, *prompt(5, 2)], 2)
    request = engine.add([*head, 3, *prompt(9, 4)], max_tokens=4)
    engine.turn()
    (told,) = of_engine(engine, request.id).requests
    (table,) = told.choices
    states = {page.entry: page.state_slot for page in table.pages if page.state_slot is not None}
    assert 3 in states, "the first message ends with page 3"
    assert table.batch_slot is not None
    found, node = {}, request.blocks.lease.node
    while node.parent is not None:
        if node.state is not None:
            found[node.state.n_tokens // PAGE_SIZE - 1] = node.state.slot
        node = node.parent
    assert states == found
    engine.run()


@pytest.mark.parametrize("has_disk", [False, True])
def test_pages_that_are_loaded_say_where_they_come_from(has_disk: bool) -> None:
    engine = Engine(16, PAGE_SIZE, n_slots=64, has_disk=has_disk, finishes_copies=True)
    engine.serve(prompt(24, 1), 2)
    engine.turn(4)
    for first in range(2, 6):
        engine.serve(prompt(32, first), 2)
    engine.turn(4)
    engine.finishes_copies = False
    request = engine.add(prompt(24, 1), 4)
    engine.launch()
    (told,) = of_engine(engine, request.id).requests
    (table,) = told.choices
    assert (table.phase, table.loading_from, table.load_stage) == ("loading", "host", "copy")
    loading = [page for page in table.pages if page.kind == "loading"]
    assert len(loading) == table.n_loading > 0
    assert {page.tier for page in loading} == {"host"}
    assert None not in {page.slot for page in loading} | {page.page for page in loading}
    assert of_engine(engine).pool.n_own >= len(loading), "they belong to the request"
    engine.finishes_copies = True
    engine.run()


def test_nothing_is_kept_between_two_questions() -> None:
    front = Frontend(open_grammars=FakeCompiler)
    front.submit("a", SHARED, max_tokens=8)
    front.turn()
    version = front.scheduler.cache.tree.version
    assert tabled(front, "a") == tabled(front, "a")
    assert front.scheduler.cache.tree.version == version
    front.run()
