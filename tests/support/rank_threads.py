"""Ranks of a model on the CPU, each in a thread of this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Self

from torch import Tensor

from radixkv.checkpoints import Checkpoint
from radixkv.runtime.device.cpu.executor import CpuExecutor
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import StepResult

_TIMEOUT_S = 60.0


class ThreadCollectives:
    """The ``Collectives`` of a rank in a thread."""

    def __init__(self, rank: int, given: list[Tensor | None], barrier: Barrier) -> None:
        self.rank = rank
        self.size = len(given)
        self.n_sums = 0
        self._given = given
        self._barrier = barrier

    def sum(self, partial: Tensor) -> Tensor:
        self.n_sums += 1
        total = None
        for part in self._exchange(partial):
            total = part.float() if total is None else total + part.float()
        assert total is not None
        return total.to(partial.dtype)

    def broadcast(self, tensor: Tensor) -> None:
        tensor.copy_(self._exchange(tensor)[0])

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._given[self.rank] = tensor
        self._barrier.wait(_TIMEOUT_S)
        given = [one.clone() for one in self._given if one is not None]
        self._barrier.wait(_TIMEOUT_S)
        return given


class RankThreads:
    """Executors of all ranks, which execute plans together."""

    def __init__(self, checkpoint: Checkpoint, settings: DeviceSettings, n_ranks: int) -> None:
        given: list[Tensor | None] = [None] * n_ranks
        barrier = Barrier(n_ranks)
        self.collectives = [ThreadCollectives(rank, given, barrier) for rank in range(n_ranks)]
        self.executors = [CpuExecutor(checkpoint, settings, one) for one in self.collectives]
        self._threads = ThreadPoolExecutor(n_ranks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def execute(self, plan: StepPlan) -> StepResult:
        """Executes a plan on all ranks, on others than rank 0 as they get it; returns the result of rank 0."""
        plans = [plan, *[plan.without_sampling()] * (len(self.executors) - 1)]

        def on(executor: CpuExecutor, plan: StepPlan) -> StepResult:
            return executor.launch(plan).sample(None).result()

        return list(self._threads.map(on, self.executors, plans))[0]
