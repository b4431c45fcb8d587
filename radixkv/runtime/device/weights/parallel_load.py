"""From files to the GPU, several tensors at a time: one thread waits for its file while others copy."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

N_LANES = 8
_BUFFER_BYTES = 16 << 20
_EVERY_S = 2.0
_GIB = 1 << 30


class Views(Protocol):
    """Tensors in files that are mapped into memory."""

    def view(self, name: str) -> Tensor:
        """The tensor as it lies in its file. Threads may call it. Raises ``CheckpointError``."""
        ...


class Lane(Protocol):
    """A way for one tensor at a time."""

    def copy(self, source: Tensor, out: Tensor) -> None:
        """Writes ``source`` over ``out``, of the same shape; waits until it is there."""
        ...


class ParallelReads:
    """A ``TensorSource`` whose tensors hold their numbers when its ``with`` block has ended. The log says from time
    to time how far it is.

    Args:
        views: where the tensors come from.
        lanes: as many threads read.
    """

    def __init__(self, views: Views, lanes: Sequence[Lane]) -> None:
        self._views = views
        self._free: SimpleQueue[Lane] = SimpleQueue()
        for lane in lanes:
            self._free.put(lane)
        self._threads = ThreadPoolExecutor(len(lanes), "radixkv-read")
        self._reads: list[tuple[Future[None], int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._wait()
        finally:
            self._threads.shutdown(cancel_futures=True)

    def fill(self, name: str, out: Tensor) -> None:
        """Writes the tensor over ``out``, later. What cannot be read raises when the block ends."""
        if out.is_cuda:
            # The allocator may have given memory that this stream has still to use, and lanes have their own.
            torch.cuda.current_stream(out.device).synchronize()
        self._reads.append((self._threads.submit(self._read, name, out), out.nbytes))

    def _read(self, name: str, out: Tensor) -> None:
        lane = self._free.get()
        try:
            # Threads do not inherit the mode, and outside it what was allocated in it may not be written to.
            with torch.inference_mode():
                lane.copy(self._views.view(name), out)
        finally:
            self._free.put(lane)

    def _wait(self) -> None:
        total = sum(n_bytes for _, n_bytes in self._reads) / _GIB
        begun = said = time.monotonic()
        n_done = 0
        for read, n_bytes in self._reads:
            read.result()
            n_done += n_bytes
            if (now := time.monotonic()) - said >= _EVERY_S:
                said = now
                logger.info("loading weights: %.1f of %.1f GiB", n_done / _GIB, total)
        logger.info("loaded %.1f GiB of weights in %.1f s", total, time.monotonic() - begun)


class PinnedLane:
    """Through two pinned buffers of 16 MiB, one filled while the other is sent; on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        buffers = [torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._buffers = cycle([(buffer, torch.cuda.Event()) for buffer in buffers])

    def copy(self, source: Tensor, out: Tensor) -> None:
        """As in ``Lane``; converts on the GPU."""
        n_numbers = _BUFFER_BYTES // source.itemsize
        with torch.cuda.stream(self._stream):
            for part, target in zip(source.view(-1).split(n_numbers), out.view(-1).split(n_numbers), strict=True):
                self._send(part, target)
            self._stream.synchronize()

    def _send(self, part: Tensor, target: Tensor) -> None:
        buffer, is_sent = next(self._buffers)
        is_sent.synchronize()
        held = buffer[: part.nbytes]
        np.copyto(held.numpy(), part.view(torch.uint8).numpy())  # unlike torch's copy it starts no threads
        sent = held.view(part.dtype)
        if part.dtype != target.dtype:  # copying would convert on the host
            sent = sent.to(target.device, non_blocking=True)
        target.copy_(sent, non_blocking=True)
        is_sent.record(self._stream)
