"""What a run was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import radixkv

PACKAGES = ("torch", "numpy", "tokenizers", "msgspec", "pyzmq", "fastapi", "uvicorn", "aiohttp", "uvloop")


def environment() -> dict[str, object]:
    """Commit, versions and processor of this machine and installation; None for what is not known."""
    return {
        "commit": _commit(Path(radixkv.__file__).resolve().parent.parent),
        "versions": {
            "radixkv": radixkv.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def _commit(folder: Path) -> str | None:
    """The commit that is checked out in a source tree; None for an installation without one."""
    if not (folder / ".git").exists():
        return None
    try:
        reply = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return reply.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or None)
