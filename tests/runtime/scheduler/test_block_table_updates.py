"""Which entries of its block table a request is sent, in a batch slot whose block table the device has already.

The fake device checks in every step that its block tables are those of the requests.
"""

from __future__ import annotations

import pytest

from radixkv.runtime.request import Request
from support.cases import covering
from support.engine import Engine, prompt

N_PROMPT = 40
N_PROMPT_PAGES = 10


def search(engine: Engine, first: int = 1, width: int = 4) -> Request:
    return engine.add(prompt(N_PROMPT, first), 16, n=width, is_beam_search=True)


def first_sent(engine: Engine) -> list[int]:
    """Returns the first entry that each row has replaced, of those that have replaced some."""
    return [row.table_start for plan in engine.device.executed for row in plan.rows if row.table_pages]


@pytest.mark.parametrize("n_searches", [1, 2])
def test_a_prompt_is_sent_once_for_each_beam(n_searches: int) -> None:
    engine = Engine(128, max_num_batched_tokens=128)
    for number in range(n_searches):
        search(engine, number)
    engine.run_to_the_end()
    starts = first_sent(engine)
    assert starts.count(0) == 4 * n_searches
    assert all(start >= N_PROMPT_PAGES for start in starts if start)


def test_a_request_is_sent_what_differs_from_the_block_table_that_its_batch_slot_had_last() -> None:
    engine = Engine(max_num_seqs=1)
    whole = prompt(N_PROMPT)
    for tokens in (whole, whole, whole[:36] + prompt(4, first=3), prompt(N_PROMPT, first=2), whole):
        engine.serve(tokens, 1)
    assert first_sent(engine) == [0, 9, 0, 0], "the second is sent nothing"


@pytest.mark.parametrize(("n_executed", "width"), covering(range(14), [2, 4]))
def test_what_a_failed_step_has_sent_is_sent_again(n_executed: int, width: int) -> None:
    engine = Engine(page_size=2)
    engine.device.fail_steps = {n_executed}
    search(engine, width=width)
    engine.run_to_the_end()
    assert engine.device.executed[n_executed].step == n_executed + 1


def test_a_first_row_that_fails_leaves_nothing_on_the_device() -> None:
    engine = Engine()
    engine.serve(prompt(N_PROMPT), 1)
    first, second = engine.add(prompt(N_PROMPT), 4), engine.add(prompt(N_PROMPT), 4)
    engine.device.fail_steps = {engine.launch().step}
    engine.run_to_the_end()
    assert engine.output(first) == engine.output(second)


def test_beams_that_are_preempted_get_what_their_new_batch_slots_lack() -> None:
    engine = Engine(24)
    for number in range(2):
        search(engine, number)
    engine.run_to_the_end()
    assert engine.scheduler.running.n_preemptions
