"""The property test can fail: each mutant breaks one rule of the production code, and must be found.

README.md in this folder lists all mutants of the tests.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis.stateful import RuleBasedStateMachine
from mutants_of_beams import OF_BEAMS
from mutants_of_drafts import OF_DRAFTS
from mutants_of_events import OF_EVENTS, OF_EVENTS_OF_STATES
from mutants_of_grammars import OF_GRAMMARS
from mutants_of_paged_eviction import OF_PAGED_EVICTION
from mutants_of_pages import OF_PAGES
from mutants_of_partial_pages import OF_PARTIAL_PAGES
from mutants_of_requests import OF_ARRIVALS, OF_REQUESTS
from mutants_of_states import OF_STATES
from mutants_of_tenants import OF_TENANTS
from mutants_of_tiers import OF_DISK, OF_TIERS
from mutants_of_verbs import OF_VERBS
from mutants_of_window_pages import OF_WINDOW_PAGES
from mutants_of_windows import OF_WINDOWS

from radixkv.errors import InvariantError
from support.engine_machine import (
    CopyingEngineMachine,
    DiskEngineMachine,
    DroppingEngineMachine,
    EngineMachine,
    MixedEngineMachine,
    RecurrentEngineMachine,
    TenantEngineMachine,
    TieredEngineMachine,
    WindowedEngineMachine,
)
from support.histories import FIRST_FAILURE, run_histories
from support.loop_machine import LoopMachine
from support.publishing_machine import PublishingMachine
from support.state_events_machines import StateEventsMachine

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]

OTHERS = (
    OF_ARRIVALS
    + OF_PAGES
    + OF_REQUESTS
    + OF_BEAMS
    + OF_GRAMMARS
    + OF_DRAFTS
    + OF_PARTIAL_PAGES
    + OF_WINDOWS
    + OF_PAGED_EVICTION
    + OF_STATES
    + OF_WINDOW_PAGES
    + OF_TENANTS
    + OF_TIERS
    + OF_DISK
    + OF_EVENTS
    + OF_EVENTS_OF_STATES
)
N_HISTORIES = 3000
"""The mutants that are hardest to find show in one of some 300."""


def test_the_readme_lists_the_mutants_with_their_targets() -> None:
    table = (Path(__file__).parent / "README.md").read_text(encoding="utf-8").partition("**`tests/tree/")[0]
    listed = set(re.findall(r"^\| `(\w+)` \| .* \| `([^`]*)` \|$", table, re.MULTILINE))
    targets = {"make test": OF_VERBS, "make test-nightly": OTHERS}
    assert listed == {(mutant.__name__, target) for target, mutants in targets.items() for mutant in mutants}


class SignatureChecks(Patch):
    """Checks that what takes a function's place takes its arguments: otherwise a mutant fails by itself."""

    def setattr(self, target: Any, name: Any, value: Any = None, raising: bool = True) -> None:
        original = getattr(target, name, None)
        if inspect.isfunction(original) and inspect.isfunction(value):
            theirs, ours = inspect.signature(original).parameters, inspect.signature(value).parameters
            kinds = {one.kind for one in ours.values()}
            for parameter in theirs.values():
                is_by_name = parameter.kind is inspect.Parameter.KEYWORD_ONLY
                takes_any = inspect.Parameter.VAR_KEYWORD if is_by_name else inspect.Parameter.VAR_POSITIONAL
                assert parameter.name in ours or takes_any in kinds or not is_by_name, f"{name}: {parameter.name}"
            n_theirs, n_ours = (
                sum(one.kind is not inspect.Parameter.KEYWORD_ONLY for one in signature.values())
                for signature in (theirs, ours)
            )
            assert n_ours >= n_theirs or inspect.Parameter.VAR_POSITIONAL in kinds, f"{name} has other arguments"
        super().setattr(target, name, value, raising)


@pytest.mark.parametrize("mutant", OF_VERBS + OTHERS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_takes_the_arguments_of_what_it_replaces(mutant: Mutant) -> None:
    with SignatureChecks.context() as patch:
        mutant(patch)


def check_that_it_is_found(
    mutant: Mutant, patch: Patch, machine: type[RuleBasedStateMachine] = EngineMachine
) -> None:
    mutant(patch)
    # KeyError and IndexError come from the fake device, when a plan refers to something that does not exist.
    with pytest.raises((AssertionError, InvariantError, KeyError, IndexError)):
        run_histories(machine, 1, N_HISTORIES, phases=FIRST_FAILURE)


@pytest.mark.parametrize("mutant", OF_VERBS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_of_a_public_verb_is_found(mutant: Mutant, monkeypatch: Patch) -> None:
    check_that_it_is_found(mutant, monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "mutant", OF_PAGES + OF_REQUESTS + OF_BEAMS + OF_GRAMMARS + OF_DRAFTS, ids=lambda mutant: mutant.__name__
)
def test_every_other_mutant_is_found(mutant: Mutant, monkeypatch: Patch) -> None:
    check_that_it_is_found(mutant, monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", OF_ARRIVALS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_of_the_wait_for_arrivals_is_found(mutant: Mutant, monkeypatch: Patch) -> None:
    check_that_it_is_found(mutant, monkeypatch, LoopMachine)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", OF_PARTIAL_PAGES, ids=lambda mutant: mutant.__name__)
def test_a_mutant_of_the_copies_of_partial_pages_is_found(mutant: Mutant, monkeypatch: Patch) -> None:
    check_that_it_is_found(mutant, monkeypatch, CopyingEngineMachine)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", OF_WINDOWS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_of_the_pages_behind_windows_is_found(mutant: Mutant, monkeypatch: Patch) -> None:
    check_that_it_is_found(mutant, monkeypatch, WindowedEngineMachine)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", OF_PAGED_EVICTION, ids=lambda mutant: mutant.__name__)
def test_a_mutant_of_what_answers_go_on_without_is_found(mutant: Mutant, monkeypatch: Patch) -> None:
    check_that_it_is_found(mutant, monkeypatch, DroppingEngineMachine)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", OF_STATES, ids=lambda mutant: mutant.__name__)
def test_a_mutant_of_the_states_of_recurrent_layers_is_found(mutant: Mutant, monkeypatch: Patch) -> None:
    check_that_it_is_found(mutant, monkeypatch, RecurrentEngineMachine)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", OF_WINDOW_PAGES, ids=lambda mutant: mutant.__name__)
def test_a_mutant_of_window_pages_is_found(mutant: Mutant, monkeypatch: Patch) -> None:
    check_that_it_is_found(mutant, monkeypatch, MixedEngineMachine)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", OF_TENANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_of_what_tenants_may_use_is_found(mutant: Mutant, monkeypatch: Patch) -> None:
    check_that_it_is_found(mutant, monkeypatch, TenantEngineMachine)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", OF_TIERS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_of_the_host_tier_is_found(mutant: Mutant, monkeypatch: Patch) -> None:
    check_that_it_is_found(mutant, monkeypatch, TieredEngineMachine)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", OF_DISK, ids=lambda mutant: mutant.__name__)
def test_a_mutant_of_the_disk_tier_is_found(mutant: Mutant, monkeypatch: Patch) -> None:
    check_that_it_is_found(mutant, monkeypatch, DiskEngineMachine)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", OF_EVENTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_of_the_events_is_found(mutant: Mutant, monkeypatch: Patch) -> None:
    check_that_it_is_found(mutant, monkeypatch, PublishingMachine)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", OF_EVENTS_OF_STATES, ids=lambda mutant: mutant.__name__)
def test_a_mutant_of_the_events_of_states_is_found(mutant: Mutant, monkeypatch: Patch) -> None:
    check_that_it_is_found(mutant, monkeypatch, StateEventsMachine)
