"""Parallel loading of tensors from files to the GPU: some threads wait for file reads while others copy."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from radixkv.runtime.device.weights.safetensors import TensorViews

logger = logging.getLogger(__name__)

N_LANES = 8
"""Number of threads, and of tensors copied at the same time."""
_BUFFER_BYTES = 16 << 20
LOG_INTERVAL_S = 2.0
_GIB = 1 << 30


class Lane(Protocol):
    """Copies one tensor at a time."""

    def copy(self, source: Tensor, out: Tensor) -> None:
        """Copies ``source`` into ``out``, which has the same shape, and waits for completion.

        Both may have any strides, but values of the last dimension of ``source`` are side by side.
        """
        ...

    def read(self, source: Tensor) -> Tensor:
        """Copies ``source`` into newly allocated memory of the device, and waits for completion."""
        ...


class ParallelLoader:
    """A ``TensorSource`` that loads in background threads; tensors are complete when its ``with`` block ends.

    Args:
        views: source of the tensors.
        lanes: one per thread.
        stream: of what is computed from tensors; None on the CPU.
        log_interval_s: time between two logs of the progress.
    """

    def __init__(
        self,
        views: TensorViews,
        lanes: Sequence[Lane],
        stream: torch.cuda.Stream | None = None,
        *,
        log_interval_s: float = LOG_INTERVAL_S,
    ) -> None:
        self._log_interval_s = log_interval_s
        self._views = views
        self._stream = stream
        self._computing = threading.Lock()
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
        """Schedules the load of the tensor into ``out``. Read errors are raised when the block ends."""
        self._submit(lambda lane: lane.copy(self._views.view(name).view(out.shape), out), out.nbytes)

    def compute(self, names: Sequence[str], use: Callable[[Sequence[Tensor]], None]) -> None:
        """Schedules the load of tensors, and then ``use`` of them. Errors are raised when the block ends.

        Tensors are loaded in parallel. Only one ``use`` runs at a time, so that its memory is needed once.
        """
        views = [self._views.view(name) for name in names]

        def load(lane: Lane) -> None:
            tensors = [lane.read(view) for view in views]
            with self._computing, torch.cuda.stream(self._stream):
                use(tensors)
                if self._stream is not None:
                    self._stream.synchronize()

        self._submit(load, sum(view.nbytes for view in views))

    def _submit(self, load: Callable[[Lane], None], n_bytes: int) -> None:
        if self._stream is not None:
            # The allocator may have reused memory that this stream still has to use; others write to it.
            torch.cuda.current_stream(self._stream.device).synchronize()
        self._reads.append((self._threads.submit(self._run, load), n_bytes))

    def _run(self, load: Callable[[Lane], None]) -> None:
        lane = self._free.get()
        try:
            # Threads do not inherit inference mode, and tensors allocated in it may only be written to in it.
            with torch.inference_mode():
                load(lane)
        finally:
            self._free.put(lane)

    def _wait(self) -> None:
        total = sum(n_bytes for _, n_bytes in self._reads) / _GIB
        begun = logged = time.monotonic()
        n_done = 0
        for read, n_bytes in self._reads:
            read.result()
            n_done += n_bytes
            if (now := time.monotonic()) - logged >= self._log_interval_s:
                logged = now
                logger.info("loading weights: %.1f of %.1f GiB", n_done / _GIB, total)
        logger.info("loaded %.1f GiB of weights in %.1f s", total, time.monotonic() - begun)


class PinnedLane:
    """Copies through two pinned buffers of 16 MiB, filling one while the other is sent, on its own stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        buffers = [torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._buffers = cycle([(buffer, torch.cuda.Event()) for buffer in buffers])

    def copy(self, source: Tensor, out: Tensor) -> None:
        """See ``Lane.copy``; converts the dtype on the GPU.

        If ``out`` is not contiguous, each slice along its first dimension is copied on the GPU first.
        """
        if not out.is_contiguous():
            for part, target in zip(source, out, strict=True):
                with torch.cuda.stream(self._stream):
                    dense = torch.empty(target.shape, dtype=target.dtype, device=target.device)
                self.copy(part, dense)
                with torch.cuda.stream(self._stream):
                    target.copy_(dense)
            self._stream.synchronize()
            return
        with torch.cuda.stream(self._stream):
            for part, target in in_pieces(source, out, _BUFFER_BYTES // source.itemsize):
                self._send(part, target)
            self._stream.synchronize()

    def read(self, source: Tensor) -> Tensor:
        """See ``Lane.read``."""
        with torch.cuda.stream(self._stream):
            out = torch.empty(source.shape, dtype=source.dtype, device=self._stream.device)
        self.copy(source, out)
        return out

    def _send(self, part: Tensor, target: Tensor) -> None:
        buffer, sent = next(self._buffers)
        sent.synchronize()
        filled = buffer[: part.nbytes].view(part.dtype).view(part.shape)
        # Unlike torch's copy it starts no threads.
        np.copyto(filled.view(torch.uint8).numpy(), part.view(torch.uint8).numpy())
        staged = filled
        if part.dtype != target.dtype:  # copy_ alone would convert on the host
            staged = staged.to(target.device, non_blocking=True)
        target.copy_(staged, non_blocking=True)
        sent.record(self._stream)


def in_pieces(source: Tensor, out: Tensor, n_elements: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields pieces of at most ``n_elements`` of both, which have one shape; ``out`` is contiguous."""
    if source.is_contiguous():
        source, out = source.view(-1), out.view(-1)
    elif source[0].numel() > n_elements:
        for one, target in zip(source, out, strict=True):
            yield from in_pieces(one, target, n_elements)
        return
    n_rows = n_elements // source[0].numel()
    yield from zip(source.split(n_rows), out.split(n_rows), strict=True)
