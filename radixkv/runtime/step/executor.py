"""Protocol between the runtime loop and the device."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from radixkv.runtime.step.adapters import DeviceAdapters
from radixkv.runtime.step.page_copier import HostMemoryCopier, SlotPart
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import LaunchedStep
from radixkv.runtime.step.window_pool import WindowPool


class PageOrigin(NamedTuple):
    """What a device's pages depend on, so that those of another device are never taken for them."""

    device: str
    """Kind of device: ``cpu`` or ``cuda``."""
    processor: str
    """The CPU's instruction sets and threads, or the GPU's compute capability."""
    torch_version: str
    layout: str
    """Order of the dimensions in a page, with their sizes."""
    scales: str
    """Scales of quantized K and V of all layers; empty if there are none."""


class Executor(Protocol):
    """A device that executes steps. Steps run in the order in which they were launched."""

    device: str
    """``cpu``, or the name of the GPU; that of each rank."""
    n_ranks: int
    """Ranks that execute each step."""
    dtype: str
    """Element type of activations: ``float32``, ``bfloat16`` or ``float16``."""
    kv_dtype: str
    """Element type of K and V: that of activations, or ``fp8_e4m3``."""
    n_pages: int
    """Pages in the KV pool."""
    vocab_size: int
    """Number of token ids; all ids are below it."""
    window: int | None
    """The most positions that a token attends to in any layer, its own included; None if a layer has no window.

    A row never reads a page whose positions all lie behind the window of its first token.
    """
    has_windows: bool
    """Whether any layer has a window."""
    n_states: int | None
    """How many states of recurrent layers the device keeps for the tree; None if no layer is recurrent. With such
    layers a row that does not start at position 0 continues what its batch slot computed last, or has loaded."""
    window_pool: WindowPool | None
    """Where layers with and without windows have pages of their own; None: all layers are in all pages. Rows then
    bring window pages, and plans copies of them."""
    adapters: DeviceAdapters | None
    """The adapters that rows may ask for; None: rows have none."""
    uses_shared_runs: bool
    """Whether the device uses ``StepPlan.shared_runs``; if not, the scheduler need not find them."""
    splits_drafts: bool
    """Whether each draft takes one of the ``max_num_seqs`` rows of a step."""
    is_asynchronous: bool
    """Whether launched steps are computed beside the host; if not, taking their results computes them."""
    page_origin: PageOrigin
    """What the bytes of a page depend on, beside the weights and the page size."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launches a step without waiting for earlier ones. Raises ``DeviceError`` or ``DeviceLost``.

        Every step launched before must be sampled (``LaunchedStep.sample``). The block table of a batch slot stays
        as it is until a row of the slot changes it, also while the slot has no row.
        """

    def open_copier(self, host_memory_bytes: int, part: SlotPart | None = None) -> HostMemoryCopier:
        """Returns a copier between the KV pool and new host memory. At most once; closed before the executor.

        Args:
            host_memory_bytes: size of the host memory.
            part: the part of each slot that this rank copies, as ``FanOut`` says; None: there are no other ranks.

        Raises:
            ConfigError: the host memory does not fit, or holds not even one page.
        """

    def check(self) -> None:
        """Raises ``DeviceLost`` if the device was lost while it had nothing to compute. O(1)."""

    def close(self) -> None:
        """Frees the device's memory. Called once, after all other calls."""
