"""What the ranks of a model on the GPUs of one host compute together, over memory that all of them can access."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from radixkv.errors import DeviceError
from radixkv.runtime.device.ops.base import RmsFields, Rows
from radixkv.runtime.device.ops.cuda.rank_sums import MAX_PROGRAMS, Meeting, broadcast, gather_logits, sum_parts
from radixkv.runtime.device.ops.summed import PartMemory

_ALIGNMENT = 256
_DISABLE_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class CudaCollectives:
    """The ``Collectives`` of ranks on the GPUs of one host.

    A GPU reads the memory of the others by itself (torch's symmetric memory): no process takes part, nothing
    listens on a port, and CUDA graphs can contain it. Kernels wait for those of the other ranks until ``give_up``.

    Memory: two parts, each of the bytes of a residual stream of the largest step, one of logits, and some KB.

    Args:
        rank: of this process, whose current device is the GPU.
        size: number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._gives_up = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        # Holds no memory of the GPU; torch would refuse to change a tensor of inference mode outside it.
        self.give_up: Callable[[], None] = partial(self._gives_up.numpy().__setitem__, 0, 1)
        """Ends the waits of all kernels, now and later: results are undefined then. Safe in any thread."""

    def allocate(
        self, max_rows: int, hidden_size: int, max_logits: int, max_broadcast: int, dtype: torch.dtype
    ) -> None:
        """Allocates the memory that the other ranks' GPUs will access; must come before ``connect``.

        Args:
            max_rows: most rows of a part.
            hidden_size: of each row.
            max_logits: most logits of a part.
            max_broadcast: most values of a tensor that is broadcast.
            dtype: of parts and logits.

        Raises:
            RuntimeError: there is too little memory.
        """
        self._max_broadcast = max_broadcast
        part_bytes = max_rows * hidden_size * dtype.itemsize
        logits_bytes = max_logits * dtype.itemsize
        sizes = [part_bytes, part_bytes, logits_bytes, 4 * self.size * MAX_PROGRAMS, 4 * max_broadcast]
        ends = torch.tensor([-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]).cumsum(0)
        self._firsts = [0, *ends[:-1].tolist()]
        device = torch.device("cuda", torch.cuda.current_device())
        self._own = _allocate(int(ends[-1]), device)
        self._parts = [
            self._own[first : first + part_bytes].view(dtype).view(max_rows, hidden_size)
            for first in self._firsts[:2]
        ]
        self._logits = self._own[self._firsts[2] :][:logits_bytes].view(dtype)

    def connect(self, store: Path, timeout_s: float) -> None:
        """Waits until all ranks do this; must come before all else. Nobody needs the store afterwards.

        Args:
            store: file by which the ranks find each other, in a folder that no other user can read; new for each
                group.
            timeout_s: how long a rank waits for the others here.

        Raises:
            DeviceError: a rank did not come in time, or the GPUs cannot access each other's memory.
        """
        device = self._own.device
        self._shared = _connect(self._own, self.rank, self.size, store, timeout_s)
        bases = list(self._shared.buffer_ptrs)
        *self._addresses, self._logits_addresses, flags, self._inboxes = (
            torch.tensor([base + first for base in bases], device=device) for first in self._firsts
        )
        counts = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)
        self._meeting = Meeting(self.rank, flags, counts, self._gives_up)

    def part(self, memory: PartMemory, n_rows: int) -> Tensor:
        """[n_rows, hidden]: the memory for this rank's part of a sum."""
        assert n_rows <= len(self._parts[memory]), "allocate was told the most rows"
        return self._parts[memory][:n_rows]

    def sum_parts(
        self, memory: PartMemory, out: Rows, residual: Tensor | None = None, norm: RmsFields | None = None
    ) -> None:
        """Sums what all ranks have in ``part(memory)``; see ``rank_sums.sum_parts``.

        The sums of a step take both memories in turn. The first one of a step may take that of the last one before,
        because all ranks meet between steps, in ``broadcast``. ``Decoder.run_distinct`` leaves layers out, so there
        two sums in a row may take the same memory; their values have no meaning.
        """
        sum_parts(self._addresses[memory], self._meeting, out, residual, norm)

    def logits_part(self, n_rows: int, size: int) -> Tensor:
        """[n_rows, size]: the memory for this rank's part of logits."""
        assert n_rows * size <= len(self._logits), "allocate was told the most logits"
        return self._logits[: n_rows * size].view(n_rows, size)

    def gather_logits(self, size: int, out: Tensor) -> None:
        """Joins what all ranks have in ``logits_part`` on rank 0; see ``rank_sums.gather_logits``."""
        gather_logits(self._logits_addresses, self._meeting, size, out)

    def broadcast(self, tensor: Tensor) -> None:
        """See ``Collectives.broadcast``; [n] int32."""
        assert len(tensor) <= self._max_broadcast, "allocate was told the most values"
        broadcast(tensor, self._inboxes, self._meeting)


class RenumberedStore(distributed.Store):  # type: ignore[name-defined,misc]
    """A store whose exchanges are numbered from 0.

    Torch's symmetric memory numbers the exchanges of a process, in keys that end with this number and the rank. So
    a process in which a model was open before would wait for keys that others never set.

    Args:
        store: of one group.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._first: int | None = None

    def set(self, key: str, value: bytes) -> None:
        """See ``Store.set``."""
        self._store.set(self._renumbered(key), value)

    def get(self, key: str) -> bytes:
        """See ``Store.get``."""
        value: bytes = self._store.get(self._renumbered(key))
        return value

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        """See ``Store.wait``."""
        self._store.wait([self._renumbered(key) for key in keys], *timeout)

    def _renumbered(self, key: str) -> str:
        prefix, number, rank = key.rsplit("/", 2)
        if self._first is None:
            self._first = int(number)
        return f"{prefix}/{int(number) - self._first}/{rank}"


def _allocate(n_bytes: int, device: torch.device) -> Tensor:
    """Allocates zeroed memory that other GPUs can be given access to."""
    from torch._C import _distributed_c10d as c10d

    own: Tensor = c10d._SymmetricMemory.empty_strided_p2p((n_bytes,), (1,), torch.uint8, device)
    own.zero_()
    torch.cuda.synchronize(device)
    return own


def _connect(own: Tensor, rank: int, size: int, path: Path, timeout_s: float) -> Any:
    """Returns torch's access to the memory of all ranks, to be kept."""
    from torch._C import _distributed_c10d as c10d  # public functions want the default group of the whole process

    files: Any = distributed.FileStore(str(path), size)  # type: ignore[attr-defined]
    files.set_timeout(timedelta(seconds=timeout_s))
    store = RenumberedStore(files)
    name: Any = f"radixkv {path}"
    group = c10d.ProcessGroup(store, rank, size)  # the registry does not keep it
    c10d._register_process_group(name, group)
    try:
        with _without_multicast():
            return c10d._SymmetricMemory.rendezvous(own, name)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise DeviceError(f"the GPUs of the ranks do not connect: {str(error).splitlines()[0]}") from error
    finally:
        c10d._unregister_process_group(name)


@contextmanager
def _without_multicast() -> Iterator[None]:
    """Tells torch to create no multicast object for symmetric memory in this block: none is used here, and the
    rendezvous fails where a fabric offers multicast but refuses it. Torch reads that from the environment alone."""
    before = os.environ.get(_DISABLE_MULTICAST)
    os.environ[_DISABLE_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_DISABLE_MULTICAST]
        else:
            os.environ[_DISABLE_MULTICAST] = before
