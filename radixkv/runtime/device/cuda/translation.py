"""CUDA's errors as the runtime's."""

from __future__ import annotations

import ctypes
from types import TracebackType

import torch

from radixkv.errors import DeviceError, DeviceLost


class Translation:
    """Translates what goes wrong on one device.

    A lack of memory passes: what the failed step had goes back to the allocator at once. All else counts as for
    good: mostly, the driver refuses every later call. Torch then ends the process where pinned memory is freed, be
    it at the end of the interpreter: what is held when a device is lost is never freed.

    Args:
        holders: of memory from the device's opening on.
    """

    def __init__(self, *holders: object) -> None:
        self._held: list[object] = list(holders)

    def of(self, step: int) -> Translated:
        """For a ``with`` around what a step does. It raises ``DeviceError`` or ``DeviceLost``."""
        return Translated(step, self._held)

    def hold(self, step: object) -> None:
        """A step is under way. O(1)."""
        self._held.append(step)

    def release(self, step: object) -> None:
        """It has ended. O(steps under way)."""
        self._held.remove(step)

    def let_go(self) -> None:
        """The device did all that was asked of it, and is closed."""
        self._held.clear()


class Translated:
    """No generator: from Python 3.12 on its frame and the error would hold each other, and with them what the step
    has on the device, until the cyclic collector runs, which is off."""

    def __init__(self, step: int, held: list[object]) -> None:
        self._step = step
        self._held = held

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and is_lack_of_memory(error):
            raise DeviceError(f"step {self._step}: the device is out of memory: {_first_line(error)}") from None
        # Triton, FlashInfer and cuBLAS raise a type that others have too: whether the GPU answers decides.
        if isinstance(error, RuntimeError) and (isinstance(error, torch.AcceleratorError) or not _answers()):
            self._held.append(error)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._held))
            raise DeviceLost(
                f"step {self._step}: the GPU failed, and must be opened anew: {_first_line(error)}"
            ) from error


def is_lack_of_memory(error: BaseException) -> bool:
    """Of the GPU's memory, or of the host's that it can reach, for which torch has no type of its own."""
    if isinstance(error, torch.AcceleratorError):
        return "out of memory" in str(error) and _answers()
    return isinstance(error, torch.OutOfMemoryError)


def _first_line(error: BaseException) -> str:
    """Torch's others are advice on debugging."""
    return str(error).partition("\n")[0]


def _answers() -> bool:
    try:
        torch.cuda.synchronize()
    except torch.AcceleratorError:
        return False
    return True
