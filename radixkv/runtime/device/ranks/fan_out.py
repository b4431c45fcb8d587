"""``FanOut``: an executor whose plans all ranks execute."""

from __future__ import annotations

from radixkv.errors import DeviceError, DeviceLost
from radixkv.runtime.device.ranks.fan_out_adapters import FanOutAdapters
from radixkv.runtime.device.ranks.fan_out_copier import FanOutCopier
from radixkv.runtime.device.ranks.frames import encode
from radixkv.runtime.device.ranks.processes import RankProcesses
from radixkv.runtime.step.adapters import DeviceAdapters
from radixkv.runtime.step.executor import Executor
from radixkv.runtime.step.page_copier import HostMemoryCopier, SlotPart
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import LaunchedStep, SampledStep, StepResult, TokenMasks

_FAILURES = (DeviceError, DeviceLost, MemoryError)
"""After which the other ranks would wait for ever for rank 0, which failed with one of them."""


class FanOut:
    """An ``Executor`` of a model that several ranks compute together.

    Each plan is encoded once, sent to the other ranks without what only sampling needs, and executed here by rank
    0, which samples. So a frame is small enough for the socket even where a rank reads late. Where the device
    computes only when a result is asked for, as the CPU does, the plan is sent then: other ranks would wait for
    rank 0 meanwhile.

    A step that fails on one rank leaves the others waiting in it, so it is lost with the device.

    Args:
        executor: of rank 0.
        ranks: the others, ready.
        n_page_parts: different parts of a page that the ranks have.
    """

    def __init__(self, executor: Executor, ranks: RankProcesses, n_page_parts: int) -> None:
        self.device = executor.device
        self.n_ranks = ranks.size
        self.dtype = executor.dtype
        self.kv_dtype = executor.kv_dtype
        self.n_pages = executor.n_pages
        self.vocab_size = executor.vocab_size
        self.window = executor.window
        self.has_windows = executor.has_windows
        self.n_states = executor.n_states
        self.window_pool = executor.window_pool
        own = executor.adapters
        self.adapters: DeviceAdapters | None = None if own is None else FanOutAdapters(own, ranks)
        self.uses_shared_runs = executor.uses_shared_runs
        self.is_asynchronous = executor.is_asynchronous
        self.splits_drafts = executor.splits_drafts
        origin = executor.page_origin
        self.page_origin = origin._replace(layout=f"{origin.layout}, of each of {ranks.size} ranks")
        self._n_page_parts = n_page_parts
        self._executor = executor
        self._ranks = ranks

    def launch(self, plan: StepPlan) -> _Step:
        """See ``Executor.launch``."""
        if not self.is_asynchronous:
            launched = self._executor.launch(plan)  # it refuses an invalid plan before any rank gets it
            return _Step(launched, self._ranks, encode(plan.without_sampling()))
        self._ranks.send(encode(plan.without_sampling()))
        try:
            with self._ranks.waiting():
                return _Step(self._executor.launch(plan), self._ranks, None)
        except _FAILURES as error:
            raise self._ranks.lost(str(error) or type(error).__name__) from None

    def open_copier(self, host_memory_bytes: int, part: SlotPart | None = None) -> HostMemoryCopier:
        """See ``Executor.open_copier``. Slots are in memory that all ranks share, with the parts of all."""
        assert part is None, "the slots of ranks are whole"
        n_ranks, n_parts = self._ranks.size, self._n_page_parts
        parts = [rank * n_parts // n_ranks for rank in range(n_ranks)]
        copier = self._executor.open_copier(
            host_memory_bytes, SlotPart(self._ranks.memory, parts[0], n_parts, stores=True, rank=0, n_ranks=n_ranks)
        )
        ranks = self._ranks
        return FanOutCopier.open(
            copier, ranks.copies, host_memory_bytes, parts, lambda reason: ranks.lost(reason, "a copy of pages")
        )

    def check(self) -> None:
        """See ``Executor.check``: a rank may end, or stop, at any time."""
        self._ranks.check()

    def close(self) -> None:
        """Ends the other ranks and frees the device's memory."""
        try:
            self._ranks.close()
        finally:
            self._executor.close()


class _Step:
    """A launched step: a ``LaunchedStep``, then a ``SampledStep``.

    Args:
        launched: rank 0's.
        ranks: the others.
        frame: the plan's, to be sent when the result is asked for; None: it is sent.
    """

    def __init__(self, launched: LaunchedStep, ranks: RankProcesses, frame: bytes | None) -> None:
        self._launched = launched
        self._ranks = ranks
        self._unsent = frame
        self._sampled: SampledStep | None = None

    def sample(self, masks: TokenMasks | None) -> _Step:
        """See ``LaunchedStep.sample``."""
        try:
            with self._ranks.waiting():
                self._sampled = self._launched.sample(masks)
        except _FAILURES as error:
            raise self._ranks.lost(str(error) or type(error).__name__) from None
        return self

    @property
    def is_done(self) -> bool:
        """See ``SampledStep.is_done``."""
        return self._sampled is not None and self._sampled.is_done

    def result(self) -> StepResult:
        """See ``SampledStep.result``."""
        assert self._sampled is not None, "a step is sampled before its result is taken"
        if self._unsent is not None:
            self._ranks.send(self._unsent)
            self._unsent = None
        try:
            with self._ranks.waiting():
                return self._sampled.result()
        except _FAILURES as error:
            raise self._ranks.lost(str(error) or type(error).__name__) from None
