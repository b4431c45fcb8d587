"""A request that does not fit blocks the queue; whatever makes room for it, or takes it away, opens it again."""

from __future__ import annotations

from radixkv.config import SchedulerConfig
from radixkv.runtime.request import Request
from support.engine import Engine, prompt


def engine(n_pages: int) -> Engine:
    return Engine(n_pages, 4, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64))


def turns_until_admitted(engine: Engine, request: Request) -> int:
    for n_turns in range(100):
        if request.scheduled_at is not None:
            return n_turns
        engine.turn()
    raise AssertionError("it is not admitted")


def test_the_one_that_did_not_fit_leaves() -> None:
    crowd = engine(12)
    crowd.add(prompt(9), max_tokens=30)
    crowd.turn()
    large, small = crowd.add(prompt(40, first=2), max_tokens=1), crowd.add(prompt(4, first=3), max_tokens=1)
    crowd.turn()
    assert small.scheduled_at is None, "the older one goes first"
    crowd.abort(large)
    assert turns_until_admitted(crowd, small) == 1
    crowd.run()
    crowd.check_answers()
    crowd.check_idle()


def test_a_row_ends_that_gives_no_page_back() -> None:
    """Its page is another's too; but the room for it to grow is free now: 16 tokens, which are 4 pages."""
    crowd = engine(192)
    crowd.add(prompt(4), max_tokens=120)
    crowd.turn()
    crowd.add(prompt(4), max_tokens=1)
    crowd.launch()
    n_pages = crowd.cache.n_available - 6
    large = crowd.add(prompt(4 * n_pages, first=2), max_tokens=1)
    crowd.launch()
    assert (len(crowd.scheduler.running), large.scheduled_at) == (2, None)
    while crowd.pending:
        crowd.collect()
    crowd.launch()
    assert (len(crowd.scheduler.running), large.scheduled_at) == (2, 0.0)
    crowd.run()
    crowd.check_answers()
    crowd.check_idle()


def test_pages_come_back_after_their_row_has_ended() -> None:
    """A step that is launched still uses them when the row has ended, and the queue is looked at."""
    crowd = engine(12)
    crowd.add(prompt(9), max_tokens=30)
    leaving = crowd.add(prompt(9, first=2), max_tokens=30)
    crowd.turn()
    crowd.turn()
    large = crowd.add(prompt(24, first=3), max_tokens=1)
    crowd.abort(leaving)
    crowd.launch()
    assert large.scheduled_at is None
    assert crowd.scheduler.running.is_releasing
    crowd.collect()
    crowd.collect()
    assert turns_until_admitted(crowd, large) == 1
    crowd.run()
    crowd.check_answers()
    crowd.check_idle()


def test_a_request_is_tried_again_when_a_running_one_has_their_common_prompt() -> None:
    """Of a document for which the pool has no room twice: between its chunks the second request does not fit."""
    crowd = Engine(40, 4, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=19))
    document = prompt(100)
    first = crowd.add([*document, 1], max_tokens=30)
    crowd.turn()
    second = crowd.add([*document, 2], max_tokens=4)
    crowd.turn()
    assert second.scheduled_at is None
    assert turns_until_admitted(crowd, second) < 10
    assert first.n_outputs < 4
    crowd.run()
    crowd.check_answers()
    crowd.check_idle()
