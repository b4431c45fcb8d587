"""Random histories of a state machine, drawn from a seed."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

SHRUNK = (Phase.generate, Phase.shrink)
FIRST_FAILURE = (Phase.generate,)
"""For mutants: how short a history shows them does not matter."""


def run_histories(
    machine: type[RuleBasedStateMachine],
    seed_number: int,
    n_histories: int,
    n_steps: int = 50,
    *,
    phases: Collection[Phase] = SHRUNK,
) -> None:
    """Runs histories of ``n_steps`` rules each; the same ones for the same arguments.

    Raises:
        Exception: what the machine raised, or a group of such.
    """
    seeded = seed(seed_number)(type(machine.__name__, (machine,), {}))
    limits = settings(
        max_examples=n_histories,
        stateful_step_count=n_steps,
        phases=phases,
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seeded, settings=limits)
