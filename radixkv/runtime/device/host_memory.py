"""How much memory there is, asked before it is touched: a process that the kernel kills says nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from radixkv.errors import ConfigError

_CONTAINER_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")


@contextmanager
def claim(n_bytes: int, purpose: str, remedy: str) -> Iterator[None]:
    """Around the allocation of ``n_bytes``, which must touch them: the next claim counts what is then left.

    Args:
        purpose: what takes the memory, as the message begins.
        remedy: what the user can set.

    Raises:
        ConfigError: that much is not available, or the allocation in the block failed.
    """
    require(n_bytes, purpose, remedy)
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # numpy's and torch's
        raise ConfigError(_problem(n_bytes, available_bytes(), purpose, remedy)) from error


def require(n_bytes: int, purpose: str, remedy: str) -> None:
    """Raises ``ConfigError`` if so much memory is not available. ``purpose`` and ``remedy`` are as in ``claim``."""
    available = available_bytes()
    if n_bytes > available:
        raise ConfigError(_problem(n_bytes, available, purpose, remedy))


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be used without swapping, by the kernel's estimate; else all of the machine's.

    A container's limit bounds it; what the container uses already is not subtracted, since that counts file caches.
    """
    available = _kernel_estimate(root / "proc/meminfo")
    if available is None:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [_read(root / path).strip() for path in _CONTAINER_LIMITS]
    return min([available, *(int(limit) for limit in limits if limit.isdecimal())])


def _problem(n_bytes: int, available: int, purpose: str, remedy: str) -> str:
    return f"{purpose} of {n_bytes} bytes does not fit into memory ({available} bytes are available); {remedy}"


def _kernel_estimate(path: Path) -> int | None:
    for line in _read(path).splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _read(path: Path) -> str:
    """The file's text, empty where a system has no such file."""
    try:
        return path.read_text("ascii")
    except OSError:
        return ""
