"""The functions of NVIDIA's driver that torch does not offer."""

from __future__ import annotations

import ctypes

import torch

from radixkv.errors import DeviceError

_MAX_BUS_ID = 32


class CudaDriver:
    """The loaded driver. Its calls keep the interpreter's lock: they take microseconds, getting it back may take
    milliseconds."""

    def __init__(self) -> None:
        self._library = ctypes.PyDLL("libcuda.so.1")
        self._copy = self._library.cuMemcpyAsync
        self._copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

    def copy(self, destination: int, source: int, n_bytes: int, stream: torch.cuda.Stream) -> None:
        """Enqueues a copy between addresses of the device's memory or of pinned memory.

        The calling thread must have used the device before. Raises ``DeviceError`` if the driver refuses.
        """
        if (code := self._copy(destination, source, n_bytes, stream.cuda_stream)) != 0:
            raise DeviceError(f"CUDA error {code} in a copy of {n_bytes} bytes between host and GPU")

    def bus_id(self, device: torch.device) -> str:
        """Returns the device's PCI address, such as ``0000:1b:00.0``; empty if the driver does not say."""
        text = ctypes.create_string_buffer(_MAX_BUS_ID)
        code = self._library.cuDeviceGetPCIBusId(text, _MAX_BUS_ID, device.index)
        return text.value.decode("ascii").lower() if code == 0 else ""
