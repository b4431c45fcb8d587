"""CUDA's errors as the runtime's."""

from __future__ import annotations

from types import TracebackType

import torch

from radixkv.errors import DeviceError, DeviceLost


class Translation:
    """Translates what goes wrong on one device.

    A lack of memory passes: what the failed step had goes back to the allocator at once. All else is for good: the
    driver refuses every later call. Those that give memory back would end the process: what the steps of a lost
    device had is kept as long as this object is.
    """

    def __init__(self) -> None:
        self._lost: list[BaseException] = []

    def of(self, step: int) -> Translated:
        """For a ``with`` around what a step does. It raises ``DeviceError`` or ``DeviceLost``."""
        return Translated(step, self._lost)


class Translated:
    """No generator: from Python 3.12 on its frame and the error would hold each other, and with them what the step
    has on the device, until the cyclic collector runs, which is off."""

    def __init__(self, step: int, lost: list[BaseException]) -> None:
        self._step = step
        self._lost = lost

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            raise DeviceError(f"step {self._step}: the device is out of memory: {error}") from None
        # Triton, FlashInfer and cuBLAS raise a type that others have too: whether the GPU answers decides.
        if isinstance(error, RuntimeError) and (isinstance(error, torch.AcceleratorError) or not _answers()):
            self._lost.append(error)
            first_line = str(error).partition("\n")[0]  # torch's others are advice on debugging
            raise DeviceLost(f"step {self._step}: the GPU failed, and must be opened anew: {first_line}") from error


def _answers() -> bool:
    try:
        torch.cuda.synchronize()
    except torch.AcceleratorError:
        return False
    return True
