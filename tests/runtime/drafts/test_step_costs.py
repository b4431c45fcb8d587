"""What steps are taken to cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.runtime.drafts.step_costs import StepCosts, bucket


@given(st.integers(1, 5000))
def test_a_bucket_is_the_next_of_few_sizes(n_rows: int) -> None:
    sizes = sorted({size for power in range(14) for size in (1 << power, 3 << power >> 1 if power else 1)})
    assert bucket(n_rows) == next(size for size in sizes if size >= n_rows)


def test_measured_times_are_taken() -> None:
    costs = StepCosts(overlaps=True)
    for n_rows, seconds in ((1, 4.0), (8, 5.0), (9, 6.0), (12, 6.0)):
        costs.record(n_rows, seconds, waits=True)
    assert [costs.seconds(n, waits=True) for n in (1, 8, 10, 12)] == pytest.approx([4.0, 5.0, 6.0, 6.0], rel=2e-3)
    for _ in range(100):
        costs.record(1, 3.0, waits=True)
    assert costs.seconds(1, waits=True) == pytest.approx(3.0, abs=0.01)


def test_a_pause_of_the_machine_counts_little() -> None:
    costs = StepCosts(overlaps=True)
    costs.record(1, 4.0, waits=False)
    costs.record(1, 400.0, waits=False)
    assert costs.seconds(1, waits=False) <= 5.0
    costs.record(8, 400.0, waits=False)
    assert costs.seconds(8, waits=False) <= 11.0


def test_a_result_that_was_taken_late_raises_no_average() -> None:
    costs = StepCosts(overlaps=True)
    costs.record(8, 6.0, waits=False, is_late=True)
    assert costs.seconds(8, waits=False) == 6.0, "it is better than a guess"
    costs.record(8, 5.0, waits=False, is_late=True)
    assert costs.seconds(8, waits=False) < 6.0, "it took no longer than that"
    for _ in range(50):
        costs.record(8, 4.0, waits=False)
        for _ in range(5):
            costs.record(8, 9.0, waits=False, is_late=True)
    assert costs.seconds(8, waits=False) == pytest.approx(4.0, abs=0.01)


def test_waiting_before_prompts_costs_what_the_device_was_idle() -> None:
    costs = StepCosts(overlaps=True)
    assert costs.more_seconds(8) == 0.0, "it is not known yet"
    costs.record_idle(8, 9e-3, has_prompts=True, is_late=True)
    assert costs.more_seconds(8) == pytest.approx(8e-3), "it is better than a guess"
    for _ in range(50):
        costs.record_idle(8, 2e-3, has_prompts=False, is_late=False)
        costs.record_idle(8, 6e-3, has_prompts=True, is_late=False)
        costs.record_idle(8, 20e-3, has_prompts=True, is_late=True)
    assert costs.more_seconds(8) == pytest.approx(4e-3, abs=1e-5), "a late result does not count"
    assert costs.more_seconds(33) == costs.more_seconds(8)
    assert costs.more_seconds(4) == pytest.approx(2e-3, abs=1e-5), "fewer rows are launched in less time"
    costs.record_idle(8, 1.0, has_prompts=True, is_late=False)
    assert costs.more_seconds(8) < 6e-3, "a pause of the machine counts little"
    for _ in range(60_000):
        costs.record(1, 4e-3, waits=False)
    assert costs.more_seconds(8) < 0.5e-3, "it is tried again later"


def test_what_was_slow_once_is_tried_again() -> None:
    costs = StepCosts(overlaps=True)
    costs.record(8, 1.0, waits=True)
    costs.record(1, 4e-3, waits=False)
    for _ in range(60_000):
        costs.record(1, 4e-3, waits=False)
    assert costs.seconds(8, waits=True) < 6e-3


def test_other_times_are_guessed() -> None:
    costs = StepCosts(overlaps=True)
    assert costs.seconds(8, waits=True) > costs.seconds(1, waits=True)
    costs.record(1, 4e-3, waits=False)
    assert costs.seconds(1, waits=True) == pytest.approx(5e-3)
    assert 5e-3 < costs.seconds(12, waits=True) < 6e-3
    costs.record(4, 7e-3, waits=True)
    assert costs.seconds(1, waits=True) == 7e-3
    assert 7e-3 < costs.seconds(12, waits=True) < 8e-3
    assert StepCosts(overlaps=False).seconds(1, waits=True) == StepCosts(overlaps=False).seconds(1, waits=False)


def test_no_guess_is_above_what_more_rows_took() -> None:
    """Such a number of rows would not be chosen, and not be measured."""
    costs = StepCosts(overlaps=False)
    for n_rows, seconds in ((1, 5e-3), (64, 9e-3), (2, 5.5e-3)):
        costs.record(n_rows, seconds, waits=False)
    assert [costs.seconds(n, waits=False) for n in (4, 32, 64)] == pytest.approx([6.5e-3, 9e-3, 9e-3])
    assert costs.seconds(96, waits=False) > 9e-3


def test_a_time_of_many_rows_that_was_forgotten_makes_fewer_rows_no_faster() -> None:
    costs = StepCosts(overlaps=True)
    for n_rows, seconds in ((1, 5e-3), (8, 6e-3), (64, 9e-3)):
        costs.record(n_rows, seconds, waits=True)
    for _ in range(10_000):
        costs.record(1, 5e-3, waits=True)
        costs.record(8, 6e-3, waits=True)
    assert costs.seconds(64, waits=True) < 2e-3
    assert [costs.seconds(n, waits=True) for n in (1, 8, 32)] == pytest.approx([5e-3, 6e-3, 6e-3], rel=2e-3)
