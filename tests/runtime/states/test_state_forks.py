"""Beams go on from each other's states: which plans copy these, and what becomes of forks when one fails."""

from __future__ import annotations

from support.engine import Engine, prompt


def test_forks_get_their_states_in_the_next_plan_before_their_parents_go_on() -> None:
    engine = Engine(200, 4, n_states=20)
    engine.add(prompt(9), 6, n=3, is_beam_search=True, stop=())
    n_forks = 0
    while (plan := engine.launch()) is not None:
        slots = {row.batch_slot for row in plan.rows}
        assert {slot for fork in plan.state_forks for slot in fork} <= slots
        n_forks += len(plan.state_forks)
        engine.collect()
    assert n_forks >= 2
    engine.check_outputs()


def test_a_fork_whose_state_was_to_come_with_a_failed_step_is_computed_again() -> None:
    """The plan was of another request alone, which is retried and fails again."""
    engine = Engine(200, 4, n_states=20, max_num_batched_tokens=8)
    alone = engine.add(prompt(60), 3)
    plan = engine.launch()
    assert plan is not None
    engine.device.fail_steps.add(plan.step)
    engine.collect()
    engine.add(prompt(5, 2), 8, n=3, is_beam_search=True, stop=())
    while alone.id not in engine.ended:
        plan = engine.launch()
        assert plan is not None
        if plan.state_forks and plan.rows[0].batch_slot == alone.batch_slot:
            engine.device.fail_steps.add(plan.step)
        engine.collect()
    assert engine.ended[alone.id].reason == "device_error"
    engine.run()
    engine.check_outputs()
