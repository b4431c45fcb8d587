"""CUDA's errors as the runtime's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import TracebackType

import torch

from radixkv.errors import DeviceError, DeviceLost


class Translation:
    """Translates what goes wrong on one device.

    A lack of memory passes: what the failed step had goes back to the allocator at once. All else counts as for
    good: mostly, the driver refuses every later call. Torch then ends the process where pinned memory is freed, be
    it at the end of the interpreter: what is held when a device is lost is never freed.

    Args:
        holders: of memory from the device's opening on. Neither they nor what is held later may refer to this:
            a cycle would stay, as the cyclic collector is off.
    """

    def __init__(self, *holders: object) -> None:
        self._held: dict[int, object] = {id(holder): holder for holder in holders}

    def of(self, step: int) -> Translated:
        """For a ``with`` around what a step does. It raises ``DeviceError`` or ``DeviceLost``."""
        return Translated(step, self.keep)

    def hold(self, memory: object) -> None:
        """A step that has it is under way. O(1)."""
        self._held[id(memory)] = memory

    def release(self, memory: object) -> None:
        """That step has ended; to say so again is no error. O(1)."""
        self._held.pop(id(memory), None)

    def keep(self, *more: object) -> None:
        """The device is lost: what is held, and ``more``, is never freed."""
        for one in more:
            self.hold(one)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._held))

    def let_go(self) -> None:
        """The device did all that was asked of it, and is closed."""
        self._held.clear()


class Translated:
    """No generator: from Python 3.12 on its frame and the error would hold each other, and with them what the step
    has on the device, until the cyclic collector runs, which is off."""

    def __init__(self, step: int, keep: Callable[[object], None]) -> None:
        self._step = step
        self._keep = keep

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and is_lack_of_memory(error):
            raise DeviceError(f"step {self._step}: there is too little memory: {_first_line(error)}") from None
        # Triton, FlashInfer and cuBLAS raise a type that others have too: whether the GPU answers decides.
        if isinstance(error, RuntimeError) and (isinstance(error, torch.AcceleratorError) or not _answers()):
            self._keep(error)
            raise DeviceLost(
                f"step {self._step}: the GPU failed, and must be opened anew: {_first_line(error)}"
            ) from error


_LACKS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What errors without a type of their own say: of the driver, of Triton, and of cuBLAS."""


def is_lack_of_memory(error: BaseException) -> bool:
    """Of the GPU's memory, or of the host's that it can reach, and the GPU answers still."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(lack in str(error) for lack in _LACKS) and _answers()


def _first_line(error: BaseException) -> str:
    """Torch's others are advice on debugging."""
    return str(error).partition("\n")[0]


def _answers() -> bool:
    try:
        torch.cuda.synchronize()
    except torch.AcceleratorError:
        return False
    return True
