"""A request that does not fit blocks the queue until something changes that could let it in."""

from __future__ import annotations

from radixkv.runtime.request import Request
from support.engine import Engine, prompt


def make_engine(n_pages: int) -> Engine:
    return Engine(n_pages, 4, max_num_seqs=4, max_num_batched_tokens=64, num_reserved_decode_tokens=16)


def turns_until_admitted(engine: Engine, request: Request) -> int:
    for n_turns in range(100):
        if request.first_row is not None:
            return n_turns
        engine.turn()
    raise AssertionError("it is not admitted")


def test_aborting_the_request_that_does_not_fit_unblocks_the_queue() -> None:
    engine = make_engine(12)
    engine.add(prompt(9), max_tokens=30)
    engine.turn()
    large, small = engine.add(prompt(40, first=2), max_tokens=1), engine.add(prompt(4, first=3), max_tokens=1)
    engine.turn()
    assert small.first_row is None, "the older one has precedence"
    engine.abort(large)
    assert turns_until_admitted(engine, small) == 1
    engine.run_to_the_end()


def test_a_finished_row_unblocks_the_queue_by_its_reserve_alone() -> None:
    """Its page is shared, so no page becomes free; but the 16 tokens, 4 pages, that are reserved for it do."""
    engine = make_engine(192)
    engine.add(prompt(4), max_tokens=120)
    engine.turn()
    engine.add(prompt(4), max_tokens=1)
    engine.launch()
    n_pages = engine.cache.n_available - 6
    large = engine.add(prompt(4 * n_pages, first=2), max_tokens=1)
    engine.launch()
    assert (len(engine.scheduler.running), large.first_row) == (2, None)
    while engine.pending:
        engine.collect()
    engine.launch()
    assert (len(engine.scheduler.running), large.first_row.scheduled_at) == (2, 0.0)
    engine.run_to_the_end()


def test_the_queue_unblocks_once_a_releasing_request_frees_its_pages() -> None:
    """A launched step still uses the pages when the request is aborted and the queue is ranked."""
    engine = make_engine(12)
    engine.add(prompt(9), max_tokens=30)
    aborted = engine.add(prompt(9, first=2), max_tokens=30)
    engine.turn(2)
    large = engine.add(prompt(24, first=3), max_tokens=1)
    engine.abort(aborted)
    engine.launch()
    assert large.first_row is None
    assert engine.scheduler.running.is_releasing
    engine.collect()
    engine.collect()
    assert turns_until_admitted(engine, large) == 1
    engine.run_to_the_end()


def test_a_request_is_tried_again_once_a_running_one_has_computed_their_common_prompt() -> None:
    """The pool cannot hold the document twice: the second request does not fit between the first one's chunks."""
    engine = Engine(40, 4, max_num_seqs=4, max_num_batched_tokens=19)
    document = prompt(100)
    first = engine.add([*document, 1], max_tokens=30)
    engine.turn()
    second = engine.add([*document, 2], max_tokens=4)
    engine.turn()
    assert second.first_row is None
    assert turns_until_admitted(engine, second) < 10
    assert first.n_outputs < 4
    engine.run_to_the_end()
