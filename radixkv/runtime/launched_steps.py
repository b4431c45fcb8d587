"""The steps on the device, from their launch to their result."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from radixkv.errors import DeviceError
from radixkv.runtime.step.executor import Executor
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import PendingStep, RunningStep, StepResult, TokenMasks


@dataclass(slots=True)
class _Step:
    plan: StepPlan
    running: RunningStep
    pending: PendingStep | None
    """None while the step waits for its token masks."""
    launched_at: float
    """Time of ``perf_counter``."""


class FinishedStep(NamedTuple):
    """A step whose result was taken."""

    plan: StepPlan
    result: StepResult
    seconds: float
    """Time since its launch, or since the result before it if that came later."""


class LaunchedSteps:
    """Launches steps, finishes them with their token masks, and takes their results in order.

    Every step is finished before the next one is launched. One without masked rows is finished at its launch.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._steps: deque[_Step] = deque()
        self._last_result_at = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def waits_for_masks(self) -> bool:
        """Whether the newest step has masked rows and is not finished, and all tokens before it are known."""
        return len(self._steps) == 1 and self._steps[0].pending is None

    def launch(self, plan: StepPlan) -> None:
        """Launches a step. Raises ``DeviceError``; the steps launched before go on then."""
        running = self._executor.launch(plan)
        self._steps.append(_Step(plan, running, None, perf_counter()))
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
        try:
            result = step.pending.result()
        except DeviceError:
            self._discard()
            raise
        now = perf_counter()
        seconds = now - max(step.launched_at, self._last_result_at)
        self._last_result_at = now
        return FinishedStep(step.plan, result, seconds)

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
