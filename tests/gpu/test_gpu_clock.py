"""The device's times of steps, against the engine's own clock."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from gpu_drive import Drive, executor_of
from gpu_support import family, greedy, needs_flashinfer, opened, save

from radixkv import LLM
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import LaunchedStep, SampledStep

pytestmark = needs_flashinfer


def record_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[SampledStep]:
    """Returns a list that gets every step that is launched from now on."""
    steps: list[SampledStep] = []
    launch = executor_of(llm).launch

    def recorded_launch(plan: StepPlan) -> LaunchedStep:
        launched = launch(plan)
        steps.append(launched.sample(None))  # sampled at its launch, since no row is masked
        return launched

    monkeypatch.setattr(executor_of(llm), "launch", recorded_launch)
    return steps


@pytest.mark.parametrize("n_layers", [1, 4])
def test_overlapping_steps_report_their_own_times(
    tmp_path: Path, n_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of graphs and prompt steps are positive; their sums are the engine's, below step time."""
    with opened(save(tmp_path, num_hidden_layers=n_layers)) as llm:
        steps = record_steps(llm, monkeypatch)
        drive = Drive(llm, checks=False)
        for number, prompt in enumerate(family(60, seed=2)):
            drive.submit(f"{number}", prompt, greedy(100))
            for _ in range(3):
                drive.turn()
        drive.run()
        stats = drive.check_all_ended()
        results = [step.result() for step in steps]
    seconds = [result.device_seconds for result in results]
    assert len(seconds) == stats.steps_total > 200
    assert min(seconds) > 0
    assert len(set(seconds)) > 20, "steps report the time of another step"
    assert sum(seconds) == pytest.approx(stats.device_busy_seconds)
    assert stats.device_busy_seconds < stats.step_seconds, "steps overlap"


def test_a_step_takes_as_long_however_late_the_host_takes_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_s = 0.1
    with opened(save(tmp_path)) as llm:
        drive = Drive(llm, checks=False)
        drive.submit("first", family(1, seed=2)[0], greedy(20))
        drive.run()
        steps = record_steps(llm, monkeypatch)
        drive.submit("second", family(1, seed=2)[0], greedy(20))
        for _ in range(25):
            drive.turn()
            time.sleep(late_s)
        drive.run()
        drive.check_all_ended()
        results = [step.result() for step in steps]
    assert len(results) >= 20
    assert all(0 < result.device_seconds < late_s / 4 for result in results)
