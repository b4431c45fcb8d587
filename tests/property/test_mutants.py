"""The property test can fail: each mutant breaks one rule of the production code, and must be found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from mutants_of_pages import OF_PAGES, free_while_in_flight, ignore_the_namespace, leak_the_tail
from mutants_of_requests import OF_REQUESTS

from radixkv.errors import InvariantError
from support.actions import drive
from support.engine_machine import EngineMachine

Patch = pytest.MonkeyPatch

N_HISTORIES = 2000
"""The mutant that is hardest to find shows in one of some 200."""


def drive_many(n_histories: int) -> None:
    for seed in range(n_histories):
        drive(seed)


@pytest.mark.parametrize("mutant", OF_PAGES + OF_REQUESTS, ids=lambda mutant: mutant.__name__)
def test_every_mutant_is_found(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    # Which of the checks finds it first is of no matter, nor that broken state makes Python itself stumble.
    with pytest.raises((AssertionError, InvariantError, ValueError, KeyError, IndexError, AttributeError)):
        drive_many(N_HISTORIES)


@pytest.mark.parametrize("mutant", [ignore_the_namespace, leak_the_tail, free_while_in_flight])
def test_the_state_machine_can_fail(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    once = settings(max_examples=200, stateful_step_count=40, deadline=None, phases=[Phase.generate], database=None)
    try:
        run_state_machine_as_test(EngineMachine, settings=once)
    except Exception:
        return  # one failure or a group of several
    raise AssertionError("no history found the mutant")
