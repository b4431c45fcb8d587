"""Forecasts of how long the device is busy."""

from __future__ import annotations

from random import Random

import pytest

from radixkv.runtime.launched_steps import LaunchedSteps
from radixkv.runtime.step.plan import Row, StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.runtime.step.step_time import StepTimeForecast


def plan_of(n_decode: int, *prompts: int) -> StepPlan:
    lengths = [*[1] * n_decode, *prompts]
    rows = tuple(Row(slot, 0, n, None, 0, 0, (), None) for slot, n in enumerate(lengths))
    return StepPlan(0, rows, n_decode=n_decode)


def test_a_step_is_expected_to_take_as_long_as_the_shorter_of_the_last_two_of_its_size() -> None:
    forecast = StepTimeForecast()
    assert forecast.seconds(plan_of(8)) == 0.0
    forecast.record(plan_of(8), 0.02)
    forecast.record(plan_of(9), 0.03)
    assert forecast.seconds(plan_of(15)) == 0.02
    forecast.record(plan_of(12), 0.5)
    assert forecast.seconds(plan_of(15)) == 0.03
    assert forecast.seconds(plan_of(16)) == forecast.seconds(plan_of(7)) == 0.0


def test_prompts_add_a_time_per_token() -> None:
    forecast = StepTimeForecast()
    forecast.record(plan_of(4), 0.01)
    forecast.record(plan_of(4, 600, 400), 0.11)
    assert forecast.seconds(plan_of(4, 500)) == pytest.approx(0.06)
    assert forecast.seconds(plan_of(0, 500)) == pytest.approx(0.05)
    forecast.record(plan_of(4, 100), 5.0)  # too few tokens to tell
    assert forecast.seconds(plan_of(4, 500)) == pytest.approx(0.06)


def test_prompt_tokens_that_a_step_computes_in_time() -> None:
    forecast = StepTimeForecast()
    assert forecast.prompt_tokens(4, 0.05) is None
    forecast.record(plan_of(4), 0.01)
    forecast.record(plan_of(4, 1000), 0.03)
    assert forecast.prompt_tokens(4, 0.05) == pytest.approx(2000, abs=1)
    assert forecast.prompt_tokens(0, 0.05) == pytest.approx(2500, abs=1)
    assert forecast.prompt_tokens(4, 0.011) == forecast.prompt_tokens(4, 0.001) == 256


class Device:
    """Computes each step in ``step_s`` after the one before, beside the host, also beside its launch."""

    def __init__(self) -> None:
        self.now, self.busy_until, self.step_s = 100.0, 0.0, 0.5
        self.pack_s, self.launch_s = 0.0, 0.0
        """The host's time of a launch before the device begins, and after that."""
        self.is_asynchronous = True

    def launch(self, plan: StepPlan) -> Device.Step:
        self.now += self.pack_s
        self.busy_until = max(self.busy_until, self.now) + self.step_s
        self.now += self.launch_s
        return Device.Step(self, self.busy_until, self.step_s)

    class Step:
        def __init__(self, device: Device, done_at: float, seconds: float) -> None:
            self._device, self._done_at, self._seconds = device, done_at, seconds

        @property
        def is_done(self) -> bool:
            return self._device.now >= self._done_at

        def sample(self, masks: object) -> Device.Step:
            return self

        def result(self) -> StepResult:
            self._device.now = max(self._device.now, self._done_at)
            return StepResult((), (), device_seconds=self._seconds)


def test_the_time_left_is_that_of_the_step_on_the_device() -> None:
    device = Device()
    steps = LaunchedSteps(device, StepTimeForecast(), clock=lambda: device.now)  # type: ignore[arg-type]
    steps.launch(plan_of(8))
    assert steps.seconds_left == 0.0
    steps.launch(plan_of(8))
    assert steps.seconds_left == 0.0
    steps.take_result()
    assert steps.seconds_left == pytest.approx(0.5)
    device.now += 0.3
    assert steps.seconds_left == pytest.approx(0.2)
    device.now += 0.3
    assert steps.seconds_left == 0.0
    steps.take_result()
    assert steps.seconds_left == 0.0


def test_a_device_that_computes_nothing_by_itself_has_no_time_left() -> None:
    device = Device()
    device.is_asynchronous = False
    steps = LaunchedSteps(device, StepTimeForecast(), clock=lambda: device.now)  # type: ignore[arg-type]
    for _ in range(3):
        steps.launch(plan_of(8))
        assert steps.seconds_left == 0.0
        steps.take_result()


def test_waiting_for_arrivals_leaves_the_device_busy() -> None:
    device, idle_s = Device(), 0.0
    device.launch_s = 0.02
    steps = LaunchedSteps(device, StepTimeForecast(), clock=lambda: device.now)  # type: ignore[arg-type]
    steps.launch(plan_of(8))
    for turn in range(60):
        device.now += max(0.0, steps.seconds_left - 2 * device.launch_s)
        if turn == 20:
            device.now += 0.6  # the host was elsewhere
        if turn >= 30:
            idle_s += max(0.0, device.now + device.launch_s - device.busy_until)
        steps.launch(plan_of(8))
        steps.take_result()
    assert idle_s == 0.0


def test_steps_that_become_much_faster_leave_the_device_idle_only_for_moments() -> None:
    """Two slow steps in a row make the forecast too long; the host asks at short intervals until it is right."""
    device, idle_s, moment_s = Device(), 0.0, 0.002
    device.step_s, device.launch_s = 1.0, 0.0005
    steps = LaunchedSteps(device, StepTimeForecast(), clock=lambda: device.now)  # type: ignore[arg-type]
    steps.launch(plan_of(8))
    for turn in range(300):
        while (left_s := steps.seconds_left - 2 * device.launch_s) > 0.001:
            device.now += min(left_s, moment_s)
        idle_s += max(0.0, device.now + device.launch_s - device.busy_until)
        if turn == 3:
            device.step_s = 0.01
        steps.launch(plan_of(8))
        steps.take_result()
    assert idle_s < 10 * moment_s


def test_launches_that_take_longer_than_steps_do_not_shorten_the_forecast() -> None:
    """The host then takes a result after the device has begun the next step, or even ended it."""
    device, forecast = Device(), StepTimeForecast()
    steps = LaunchedSteps(device, forecast, clock=lambda: device.now)  # type: ignore[arg-type]
    steps.launch(plan_of(8))
    for device.launch_s in (0.01, 0.4, 0.6, 0.8, 0.01, 0.4):
        steps.launch(plan_of(8))
        steps.take_result()
        assert forecast.seconds(plan_of(8)) == device.step_s


@pytest.mark.parametrize("seed", range(20))
def test_the_time_left_is_right_however_late_the_host_is(seed: int) -> None:
    """Exact after a result that the host waited for; otherwise too short by the host's time before a step."""
    rng, device, forecast, done_at = Random(seed), Device(), StepTimeForecast(), list[float]()
    device.pack_s = 0.05
    forecast.record(plan_of(8), device.step_s)
    steps = LaunchedSteps(device, forecast, clock=lambda: device.now)  # type: ignore[arg-type]
    is_exact = False
    for _ in range(200):
        action = rng.choice(["launch", "take", "other"])
        if action == "launch" and len(steps) < 2:
            is_exact = is_exact and device.now + device.pack_s <= device.busy_until
            device.launch_s = rng.choice([0.01, 0.4, 0.8])
            steps.launch(plan_of(8))
            done_at.append(device.busy_until)
        elif action == "take" and done_at:
            is_exact = is_exact or device.now < done_at[0]
            done_at.pop(0)
            steps.take_result()
        else:
            device.now += rng.choice([0.01, 0.3, 3.0])
        if len(steps) == 1:
            left_s = max(0.0, device.busy_until - device.now)
            early_s = 0.0 if is_exact else device.pack_s
            assert left_s - early_s - 1e-9 <= steps.seconds_left <= left_s + 1e-9
