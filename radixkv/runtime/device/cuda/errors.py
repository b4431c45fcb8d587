"""Conversion of CUDA errors to the runtime's ``DeviceError`` and ``DeviceLost``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import TracebackType

import torch

from radixkv.errors import DeviceError, DeviceLost


class CudaErrorConverter:
    """Converts the errors of one device, and keeps the memory of a lost device from being freed.

    Running out of memory is temporary: the failed step's memory goes back to the allocator at once. Any other
    error counts as permanent, because mostly the driver refuses every later call. Torch then aborts the process
    when pinned memory is freed, even at interpreter exit, so memory held when a device is lost is never freed.

    Args:
        holders: objects that own device memory as long as the device is open. Neither they nor what is held later
            may refer to this converter: the cyclic collector is off, so a cycle would never be freed.
    """

    def __init__(self, *holders: object) -> None:
        self._held: dict[int, object] = {id(holder): holder for holder in holders}

    def convert(self, step: int) -> ErrorConversion:
        """Returns a context manager around one step's work. It raises ``DeviceError`` or ``DeviceLost``."""
        return ErrorConversion(step, self.never_free)

    def hold(self, memory: object) -> None:
        """Keeps a reference to the memory of a step in flight. O(1)."""
        self._held[id(memory)] = memory

    def release(self, memory: object) -> None:
        """Drops the reference, as the step has ended; may be called again. O(1)."""
        self._held.pop(id(memory), None)

    def never_free(self, *more: object) -> None:
        """Keeps everything held, and ``more``, for the life of the process: the device is lost."""
        for memory in more:
            self.hold(memory)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._held))

    def release_all(self) -> None:
        """Drops all references: the device has finished all work and is closed."""
        self._held.clear()


class ErrorConversion:
    """The context manager of ``CudaErrorConverter.convert``.

    It is not a generator: from Python 3.12 on, a generator's frame and the error would refer to each other and keep
    the step's device memory alive until the cyclic collector runs, which is off.

    Args:
        step: number of the step, for error texts.
        never_free: called with the error of a lost device.
    """

    def __init__(self, step: int, never_free: Callable[[object], None]) -> None:
        self._step = step
        self._never_free = never_free

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and is_out_of_memory(error):
            raise DeviceError(f"step {self._step}: there is too little memory: {_first_line(error)}") from None
        # Triton, FlashInfer and cuBLAS raise plain RuntimeError, as other code does: ask whether the GPU responds.
        if isinstance(error, RuntimeError) and (isinstance(error, torch.AcceleratorError) or not _gpu_responds()):
            self._never_free(error)
            raise DeviceLost(
                f"step {self._step}: the GPU failed and must be reopened: {_first_line(error)}"
            ) from error


_OUT_OF_MEMORY_TEXTS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Texts of out-of-memory errors of the driver, Triton and cuBLAS, which have no type of their own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether GPU memory or pinned host memory ran out while the GPU still responds."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return (
        isinstance(error, RuntimeError)
        and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)
        and _gpu_responds()
    )


def _first_line(error: BaseException) -> str:
    """The first line of the error's text: torch's other lines are debugging advice."""
    return str(error).partition("\n")[0]


def _gpu_responds() -> bool:
    try:
        torch.cuda.synchronize()
    except torch.AcceleratorError:
        return False
    return True
