"""The steps on the device, from their launch to their result."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from radixkv.errors import DeviceError
from radixkv.runtime.step.executor import Executor
from radixkv.runtime.step.forecast import StepForecast
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import PendingStep, RunningStep, StepResult, TokenMasks


@dataclass(slots=True)
class _Step:
    plan: StepPlan
    running: RunningStep
    pending: PendingStep | None
    """None while the step waits for its token masks."""
    launched_at: float
    """On the clock."""
    done_by: float | None = None
    """On the clock: when ``look`` first saw that the device had finished; None before."""


class FinishedStep(NamedTuple):
    """A step whose result was taken."""

    plan: StepPlan
    result: StepResult
    seconds: float
    """Time since its launch, or since the result before it if that came later."""
    busy_seconds: float
    """The part of it in which the device computed: the host may take a result long after its step."""


class LaunchedSteps:
    """Launches steps, finishes them with their token masks, and takes their results in order.

    Every step is finished before the next one is launched. One without masked rows is finished at its launch.

    Args:
        executor: the device.
        forecast: learns from the steps.
        clock: seconds, monotonic.
    """

    def __init__(
        self, executor: Executor, forecast: StepForecast, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._executor = executor
        self._forecast = forecast
        self._clock = clock
        self._steps: deque[_Step] = deque()
        self._last_result_at = 0.0
        self._last_done_by = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def waits_for_masks(self) -> bool:
        """Whether the newest step has masked rows and is not finished, and all tokens before it are known."""
        return len(self._steps) == 1 and self._steps[0].pending is None

    @property
    def seconds_left(self) -> float:
        """The forecast of how long the device is still busy.

        0 if the device is not asynchronous or has finished, or if not exactly one step is launched.
        """
        if len(self._steps) != 1 or not self._executor.is_asynchronous:
            return 0.0
        step = self._steps[0]
        if step.pending is None or step.pending.is_done:
            return 0.0
        begun = max(step.launched_at, self._last_result_at)
        return max(0.0, begun + self._forecast.seconds(step.plan) - self._clock())

    def look(self) -> None:
        """Notes whether the device has finished, and is idle until the next launch. O(1).

        The idle time before the first look that sees it counts as busy. So look before long work of the host.
        """
        if self._executor.is_asynchronous and len(self._steps) == 1:
            step = self._steps[0]
            if step.done_by is None and step.pending is not None and step.pending.is_done:
                step.done_by = self._clock()

    def launch(self, plan: StepPlan) -> None:
        """Launches a step. Raises ``DeviceError``; the steps launched before go on then."""
        self.look()
        running = self._executor.launch(plan)
        self._steps.append(_Step(plan, running, None, self._clock()))
        if not plan.is_masked:
            self.finish(None)

    def finish(self, masks: TokenMasks | None) -> None:
        """Finishes the newest step. Raises ``DeviceError``; the step is dropped then."""
        step = self._steps[-1]
        try:
            step.pending = step.running.finish(masks)
        except DeviceError:
            self._steps.pop()
            raise

    def take_result(self) -> FinishedStep:
        """Waits for the oldest step. Raises ``DeviceError`` if it failed, with all steps launched after it."""
        step = self._steps.popleft()
        assert step.pending is not None, "a step is finished before the next one is launched"
        asked_at = self._clock()
        try:
            result = step.pending.result()
        except DeviceError:
            self._discard()
            raise
        now = self._clock()
        seconds = now - max(step.launched_at, self._last_result_at)
        self._last_result_at = now
        self._forecast.record(step.plan, seconds)
        done_by = now if step.done_by is None else step.done_by
        # A device that is not asynchronous computes a step when its result is asked for.
        begun = max(step.launched_at, self._last_done_by) if self._executor.is_asynchronous else asked_at
        self._last_done_by = done_by
        return FinishedStep(step.plan, result, seconds, done_by - begun)

    def drop(self) -> None:
        """Forgets all steps, without waiting."""
        self._steps.clear()

    def _discard(self) -> None:
        """Waits for all steps, and drops their results."""
        while self._steps:
            step = self._steps.popleft()
            try:
                (step.pending or step.running.finish(None)).result()
            except DeviceError:
                continue
