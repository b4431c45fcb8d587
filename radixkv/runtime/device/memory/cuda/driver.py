"""The functions of NVIDIA's driver that torch does not offer."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.errors import DeviceError

_MAX_BUS_ID = 32
_STREAM_ORDER = 1
"""``CU_MEMCPY_SRC_ACCESS_ORDER_STREAM``: sources are read in the order of the stream."""


class _CopyAttributes(ctypes.Structure):
    """``CUmemcpyAttributes``; locations of type 0 are left to the driver."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("destination_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class CudaDriver:
    """The loaded driver. Its calls keep the interpreter's lock: they take microseconds, getting it back may take
    milliseconds."""

    def __init__(self) -> None:
        self._library = ctypes.PyDLL("libcuda.so.1")
        self._copy = self._library.cuMemcpyBatchAsync_v2
        self._copy.argtypes = [
            *([ctypes.c_void_p] * 3),
            ctypes.c_size_t,
            *([ctypes.c_void_p] * 2),
            ctypes.c_size_t,
            ctypes.c_void_p,
        ]

    def copy(
        self,
        destinations: NDArray[np.int64],
        sources: NDArray[np.int64],
        n_bytes: NDArray[np.int64],
        stream: torch.cuda.Stream,
    ) -> None:
        """Enqueues copies, which may take place in any order, by one call.

        The calling thread must have used the device before. Raises ``DeviceError`` if the driver refuses.

        Args:
            destinations, sources: [n] addresses in the device's memory or in pinned memory, contiguous.
            n_bytes: [n] sizes, contiguous.
            stream: what was enqueued to it goes before.
        """
        attributes, first = _CopyAttributes(source_access_order=_STREAM_ORDER), ctypes.c_size_t(0)
        code = self._copy(
            destinations.ctypes.data,
            sources.ctypes.data,
            n_bytes.ctypes.data,
            len(n_bytes),
            ctypes.byref(attributes),
            ctypes.byref(first),
            1,
            stream.cuda_stream,
        )
        if code != 0:
            raise DeviceError(f"CUDA error {code} in a copy of {n_bytes.sum()} bytes between host and GPU")

    def bus_id(self, device: torch.device) -> str:
        """Returns the device's PCI address, such as ``0000:1b:00.0``; empty if the driver does not say."""
        text = ctypes.create_string_buffer(_MAX_BUS_ID)
        code = self._library.cuDeviceGetPCIBusId(text, _MAX_BUS_ID, device.index)
        return text.value.decode("ascii").lower() if code == 0 else ""
