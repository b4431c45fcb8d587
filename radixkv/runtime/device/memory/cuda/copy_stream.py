"""A stream for copies beside the steps."""

from __future__ import annotations

import torch


class CopyStream:
    """A stream of the device, which copies and short kernels are enqueued to.

    Args:
        device: of the stream.
    """

    def __init__(self, device: torch.device) -> None:
        # With priority, the short kernels start between the blocks of a step's long ones; else a copy beside a
        # prompt's step takes several times as long.
        self.stream = torch.cuda.Stream(device, priority=-1)
        """The stream itself."""
        self._done = torch.cuda.Event(blocking=True)

    def wait(self) -> None:
        """Waits for all work of the stream, without processor time."""
        self._done.record(self.stream)
        self._done.synchronize()
