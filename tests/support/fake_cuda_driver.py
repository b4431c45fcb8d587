"""CUDA's driver as far as virtual memory goes, in host memory: what is mapped twice is the same memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from types import SimpleNamespace
from typing import Any

GRANULE = 2 << 20
_SUCCESS, _INVALID_VALUE, _OUT_OF_MEMORY = 0, 1, 2
_PROT_NONE, _MAP_FIXED = 0, 0x10
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class FakeCudaDriver:
    """Functions of ``cuda.bindings.driver``. Refuses what CUDA's documentation forbids.

    Args:
        max_granules: physical memory.
    """

    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(
        CU_MEM_ALLOC_GRANULARITY_MINIMUM=0, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1
    )

    def __init__(self, max_granules: int = 1024) -> None:
        self._file = os.memfd_create("granules")
        os.ftruncate(self._file, max_granules * GRANULE)
        self._free = list(reversed(range(max_granules)))
        self.created: dict[int, int] = {}
        """Physical memory that is not released: handle and its offset in the file."""
        self.ranges: dict[int, int] = {}
        """Reserved addresses and sizes."""
        self.mapped: dict[int, int] = {}
        """Mapped addresses and handles."""
        self.accessible: set[int] = set()
        """Mapped addresses that kernels may use."""

    def __del__(self) -> None:
        for address, n_bytes in self.ranges.items():
            _libc.munmap(address, n_bytes)
        os.close(self._file)

    @property
    def holds_nothing(self) -> bool:
        """Whether all was given back."""
        return not (self.mapped or self.created or self.ranges or self.accessible)

    @staticmethod
    def CUmemAllocationProp() -> Any:  # noqa: N802
        return SimpleNamespace(type=0, location=SimpleNamespace(type=0, id=0))

    @staticmethod
    def CUmemAccessDesc() -> Any:  # noqa: N802
        return SimpleNamespace(flags=0, location=SimpleNamespace(type=0, id=0))

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int, int]:  # noqa: N802
        return _SUCCESS, 1

    def cuCtxGetCurrent(self) -> tuple[int, str]:  # noqa: N802
        return _SUCCESS, "context"

    def cuCtxSetCurrent(self, context: str) -> tuple[int]:  # noqa: N802
        return (_SUCCESS if context == "context" else _INVALID_VALUE,)

    def cuCtxSynchronize(self) -> tuple[int]:  # noqa: N802
        return (_SUCCESS,)

    def cuDriverGetVersion(self) -> tuple[int, int]:  # noqa: N802
        return _SUCCESS, 13000

    def cuGetErrorName(self, code: int) -> tuple[int, bytes]:  # noqa: N802
        names = {_INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE", _OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY"}
        return _SUCCESS, names[code]

    def cuMemGetAllocationGranularity(self, kind: Any, option: int) -> tuple[int, int]:  # noqa: N802
        return _SUCCESS, GRANULE

    def cuMemAddressReserve(  # noqa: N802
        self, size: int, alignment: int, address: int, flags: int
    ) -> tuple[int, int | None]:
        if size % GRANULE:
            return _INVALID_VALUE, None
        found = _libc.mmap(None, size, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert found != _FAILED
        self.ranges[found] = size
        return _SUCCESS, found

    def cuMemAddressFree(self, address: int, size: int) -> tuple[int]:  # noqa: N802
        if self.ranges.get(address) != size or self._mapped_in(address, size):
            return (_INVALID_VALUE,)
        del self.ranges[address]
        _libc.munmap(address, size)
        return (_SUCCESS,)

    def cuMemCreate(self, size: int, kind: Any, flags: int) -> tuple[int, int | None]:  # noqa: N802
        if size != GRANULE or kind.type != 1 or kind.location.type != 1:
            return _INVALID_VALUE, None
        if not self._free:
            return _OUT_OF_MEMORY, None
        place = self._free.pop()
        self.created[1000 + place] = place * GRANULE
        return _SUCCESS, 1000 + place

    def cuMemRelease(self, handle: int) -> tuple[int]:  # noqa: N802
        if self.created.pop(handle, None) is None:
            return (_INVALID_VALUE,)
        if handle not in self.mapped.values():
            self._free.append(handle - 1000)
        return (_SUCCESS,)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[int]:  # noqa: N802
        is_reserved = any(first <= address and address + size <= first + n for first, n in self.ranges.items())
        if size != GRANULE or address in self.mapped or not is_reserved or handle not in self.created:
            return (_INVALID_VALUE,)
        self.mapped[address] = handle
        self._replace(address, mmap.MAP_SHARED, self._file, self.created[handle])
        return (_SUCCESS,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[int]:  # noqa: N802
        places = range(address, address + size, GRANULE)
        if any(place not in self.mapped for place in places) or access[0].flags != 3 or count != len(access):
            return (_INVALID_VALUE,)
        self.accessible.update(places)
        _libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_WRITE)
        return (_SUCCESS,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[int]:  # noqa: N802
        if len(self._mapped_in(address, size)) * GRANULE != size:
            return (_INVALID_VALUE,)
        for place in range(address, address + size, GRANULE):
            handle = self.mapped.pop(place)
            self.accessible.discard(place)
            self._replace(place, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
            if handle not in self.created and handle not in self.mapped.values():
                self._free.append(handle - 1000)
        return (_SUCCESS,)

    def _mapped_in(self, address: int, size: int) -> list[int]:
        return [place for place in range(address, address + size, GRANULE) if place in self.mapped]

    def _replace(self, address: int, kind: int, file: int, offset: int) -> None:
        found = _libc.mmap(address, GRANULE, _PROT_NONE, kind | _MAP_FIXED, file, offset)
        assert found == address, ctypes.get_errno()
