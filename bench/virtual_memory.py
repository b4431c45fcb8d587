"""Virtual memory of a GPU: reserved address ranges, into which physical memory is mapped.

Calls the driver through ``cuda-bindings``, which torch's builds for CUDA 13 bring. Memory is never paged: what is
mapped has physical memory on the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from radixkv.errors import DeviceError


def load_driver() -> Any:
    """Returns the bindings of CUDA's driver. Raises ``DeviceError`` if they are not installed."""
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DeviceError(
            f"virtual memory needs cuda-bindings: pip install 'cuda-bindings<14' ({error})"
        ) from error


class VirtualMemory:
    """Reserves address ranges of one GPU, creates physical memory and maps it. As a context, gives all back.

    Sizes and addresses are multiples of ``minimum_granule`` bytes. A method costs a call of the driver, and less
    than a microsecond of its own. All raise ``DeviceError`` if the driver refuses.

    Args:
        device: index of the GPU, which this thread must have used before.
        driver: of ``load_driver``.
    """

    def __init__(self, device: int, driver: Any) -> None:
        self._driver = driver
        supported = self._check(
            "cuDeviceGetAttribute",
            driver.cuDeviceGetAttribute(
                driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device
            ),
        )
        if not supported:
            raise DeviceError(f"GPU {device} has no virtual memory management")
        location_type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location.type, self._kind.location.id = location_type, device
        self._access = driver.CUmemAccessDesc()
        self._access.location.type, self._access.location.id = location_type, device
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._context = self._check("cuCtxGetCurrent", driver.cuCtxGetCurrent())
        self._ranges: dict[int, int] = {}
        self._mapped: dict[int, int] = {}
        self._created: dict[int, Any] = {}
        options = driver.CUmemAllocationGranularity_flags
        self.minimum_granule = self._granularity(options.CU_MEM_ALLOC_GRANULARITY_MINIMUM)
        """Fewest bytes that can be mapped."""
        self.recommended_granule = self._granularity(options.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        """Bytes that the driver recommends."""

    def __enter__(self) -> VirtualMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Waits for the GPU, and gives back all that is mapped, created and reserved."""
        self._check("cuCtxSynchronize", self._driver.cuCtxSynchronize())
        for address, n_bytes in list(self._mapped.items()):
            self.unmap(address, n_bytes)
        for handle in list(self._created.values()):
            self.release(handle)
        for address in list(self._ranges):
            self.free(address)

    def enter_thread(self) -> None:
        """Lets the calling thread use this memory."""
        self._check("cuCtxSetCurrent", self._driver.cuCtxSetCurrent(self._context))

    def version(self) -> int:
        """Returns the driver's version: a call that does nothing, whose time is that of calling."""
        return int(self._check("cuDriverGetVersion", self._driver.cuDriverGetVersion()))

    def reserve(self, n_bytes: int) -> int:
        """Returns the address of a new range, which has no physical memory."""
        address = int(self._check("cuMemAddressReserve", self._driver.cuMemAddressReserve(n_bytes, 0, 0, 0)))
        self._ranges[address] = n_bytes
        return address

    def free(self, address: int) -> None:
        """Gives back a reserved range in which nothing is mapped."""
        n_bytes = self._ranges[address]
        self._check("cuMemAddressFree", self._driver.cuMemAddressFree(address, n_bytes))
        del self._ranges[address]

    def create(self, n_bytes: int) -> Any:
        """Returns the handle of new physical memory; what it holds is undefined."""
        handle = self._check("cuMemCreate", self._driver.cuMemCreate(n_bytes, self._kind, 0))
        self._created[id(handle)] = handle
        return handle

    def release(self, handle: Any) -> None:
        """Gives back physical memory, as soon as it is mapped nowhere."""
        self._check("cuMemRelease", self._driver.cuMemRelease(handle))
        del self._created[id(handle)]

    def map(self, address: int, n_bytes: int, handle: Any) -> None:
        """Maps physical memory of this size, which other addresses may map too. It cannot be accessed yet."""
        self._check("cuMemMap", self._driver.cuMemMap(address, n_bytes, 0, handle, 0))
        self._mapped[address] = n_bytes

    def allow(self, address: int, n_bytes: int) -> None:
        """Lets kernels read and write a range that is mapped without a gap."""
        self._check("cuMemSetAccess", self._driver.cuMemSetAccess(address, n_bytes, [self._access], 1))

    def unmap(self, address: int, n_bytes: int) -> None:
        """Unmaps all that is mapped in a range. No kernel may use it any more."""
        self._check("cuMemUnmap", self._driver.cuMemUnmap(address, n_bytes))
        end = address + n_bytes
        while address < end:
            address += self._mapped.pop(address)

    def _granularity(self, option: Any) -> int:
        result = self._driver.cuMemGetAllocationGranularity(self._kind, option)
        return int(self._check("cuMemGetAllocationGranularity", result))

    def _check(self, name: str, result: tuple[Any, ...]) -> Any:
        """Returns the value of a call, None if it has none."""
        code, *values = result
        if int(code) != 0:
            _, text = self._driver.cuGetErrorName(code)
            raise DeviceError(f"{name} failed: {text.decode() if text else code}")
        return values[0] if values else None


def tensor_at(address: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a contiguous tensor over an address range, which must outlive it.

    Unmapped addresses in the range must not be accessed. ``__cuda_array_interface__`` is no way to such a tensor:
    torch asks the driver for the device of its first address, which may not be mapped.
    """
    n_bytes = dtype.itemsize
    for size in shape:
        n_bytes *= size
    storage = torch._C._construct_storage_from_data_pointer(address, device, n_bytes)
    return torch.empty(0, dtype=dtype, device=device).set_(storage).view(*shape)
