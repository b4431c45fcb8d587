"""The steps on the device, from their launch to their result."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from radixkv.errors import DeviceError
from radixkv.runtime.step.executor import Executor
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import LaunchedStep, SampledStep, StepResult, TokenMasks
from radixkv.runtime.step.step_time import StepTimeForecast


@dataclass(slots=True)
class _Step:
    plan: StepPlan
    launched: LaunchedStep
    sampled: SampledStep | None
    """None while the step waits for its token masks."""
    begun_at: float
    """On the clock: when its launch began."""


class LaunchedSteps:
    """Launches steps, samples them with their token masks, and takes their results in order.

    Every step is sampled before the next one is launched. One without masked rows is sampled at its launch.

    Args:
        executor: the device.
        forecast: learns from the steps.
        clock: seconds, monotonic.
    """

    def __init__(
        self, executor: Executor, forecast: StepTimeForecast, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._executor = executor
        self._forecast = forecast
        self._clock = clock
        self._steps: deque[_Step] = deque()
        self._ended_at = 0.0
        """On the clock: when the device ended the step whose result was taken last."""

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def waits_for_masks(self) -> bool:
        """Whether the newest step has masked rows and is not sampled, and all tokens before it are known."""
        return len(self._steps) == 1 and self._steps[0].sampled is None

    @property
    def seconds_left(self) -> float:
        """The forecast of how long the device is still busy.

        0 if the device is not asynchronous or has finished, or if not exactly one step is launched.
        """
        if len(self._steps) != 1 or not self._executor.is_asynchronous:
            return 0.0
        step = self._steps[0]
        if step.sampled is None or step.sampled.is_done:
            return 0.0
        begun_at = max(step.begun_at, self._ended_at)
        return max(0.0, begun_at + self._forecast.seconds(step.plan) - self._clock())

    def launch(self, plan: StepPlan) -> None:
        """Launches a step. Raises ``DeviceError``; the steps launched before go on then."""
        begun_at = self._clock()
        self._steps.append(_Step(plan, self._executor.launch(plan), None, begun_at))
        if not plan.is_masked:
            self.sample(None)

    def sample(self, masks: TokenMasks | None) -> None:
        """Samples the newest step. Raises ``DeviceError``; the step is dropped then."""
        step = self._steps[-1]
        try:
            step.sampled = step.launched.sample(masks)
        except DeviceError:
            self._steps.pop()
            raise

    def take_result(self) -> tuple[StepPlan, StepResult]:
        """Waits for the oldest step; returns its plan and result. Raises ``DeviceError`` if it failed, with all
        steps launched after it."""
        step = self._steps.popleft()
        assert step.sampled is not None, "a step is sampled before the next one is launched"
        is_awaited = not step.sampled.is_done
        try:
            result = step.sampled.result()
        except DeviceError:
            self._discard()
            raise
        now = self._clock()
        # A launch may take longer than the step before it, whose result is then taken late.
        ended_at = max(step.begun_at, self._ended_at) + result.device_seconds
        self._ended_at = now if is_awaited else min(now, ended_at)
        self._forecast.record(step.plan, result.device_seconds)
        return step.plan, result

    def drop(self) -> None:
        """Forgets all steps, without waiting."""
        self._steps.clear()

    def _discard(self) -> None:
        """Waits for all steps, and drops their results."""
        while self._steps:
            step = self._steps.popleft()
            try:
                (step.sampled or step.launched.sample(None)).result()
            except DeviceError:
                continue
