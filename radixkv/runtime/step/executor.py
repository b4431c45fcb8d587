"""The device as the loop sees it: a protocol."""

from __future__ import annotations

from typing import Protocol

from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import Pending


class Executor(Protocol):
    """The device, as the loop sees it. Steps run in the order of their launches."""

    @property
    def device(self) -> str:
        """``cpu``, or the GPU's name."""
        ...

    @property
    def dtype(self) -> str:
        """What it computes in: ``float32``, ``bfloat16``, ``float16``."""
        ...

    @property
    def n_pages(self) -> int:
        """Pages in the pool."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def wants_shared_runs(self) -> bool:
        """Whether plans are to say which pages rows share."""
        ...

    def launch(self, plan: StepPlan) -> Pending:
        """Starts a step without waiting for those before it. Raises ``DeviceError``."""
        ...

    def close(self) -> None:
        """Gives the device's memory back. Called once; nothing is launched or asked after it."""
        ...
