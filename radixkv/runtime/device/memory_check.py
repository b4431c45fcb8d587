"""Checks of available host memory before allocations, because an out-of-memory kill leaves no message."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from radixkv.errors import ConfigError

_NO_LIMIT_BYTES = 1 << 60
"""The first version of control groups shows no limit as a number about 8 times as high."""
_CONTAINER_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")


@contextmanager
def check_allocation(n_bytes: int, purpose: str, remedy: str) -> Iterator[None]:
    """Guards the allocation of ``n_bytes`` in its ``with`` block.

    The block must touch the memory, so that the next check sees it as used.

    Args:
        n_bytes: size of the allocation.
        purpose: what needs the memory; the error message begins with it.
        remedy: what the user can change; the error message ends with it.

    Raises:
        ConfigError: that much memory is not available, or the allocation in the block failed.
    """
    require_memory(n_bytes, purpose, remedy)
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # raised by numpy and by torch
        raise ConfigError(_problem(n_bytes, available_bytes(), purpose, remedy)) from error


def require_memory(n_bytes: int, purpose: str, remedy: str) -> None:
    """Raises ``ConfigError`` if ``n_bytes`` are not available.

    Args:
        n_bytes: memory needed.
        purpose: what needs the memory; the error message begins with it.
        remedy: what the user can change; the error message ends with it.
    """
    available = available_bytes()
    if n_bytes > available:
        raise ConfigError(_problem(n_bytes, available, purpose, remedy))


def available_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes that can be used without swapping, as the kernel estimates them.

    Without an estimate it is the machine's whole memory. A container's limit caps the result. The container's
    current usage is not subtracted, because it includes file caches.
    """
    available = _kernel_estimate(root / "proc/meminfo")
    if available is None:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([available, *_container_limits(root)])


def require_host_memory(n_bytes: int, root: Path = Path("/")) -> None:
    """Raises ``ConfigError`` if a host tier of ``n_bytes`` cannot fit, now or later.

    A container's limit decides where there is one: a virtual machine may show less memory than it can get.
    """
    limit = min(_container_limits(root), default=None) or available_bytes(root)
    if n_bytes > limit:
        raise ConfigError(_problem(n_bytes, limit, "a host tier", "set --host-memory lower"))


def _container_limits(root: Path) -> list[int]:
    limits = [_read(root / path).strip() for path in _CONTAINER_LIMITS]
    return [int(limit) for limit in limits if limit.isdecimal() and int(limit) < _NO_LIMIT_BYTES]


def _problem(n_bytes: int, available: int, purpose: str, remedy: str) -> str:
    return f"{purpose} of {n_bytes} bytes does not fit into memory ({available} bytes are available); {remedy}"


def _kernel_estimate(path: Path) -> int | None:
    for line in _read(path).splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _read(path: Path) -> str:
    """Returns the text of a file, or an empty string if the system has no such file."""
    try:
        return path.read_text("ascii")
    except OSError:
        return ""
