"""The commit, software versions and hardware that a result was measured with."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

import radixkv
from radixkv.processes.cores import n_cores

PACKAGES = ("torch", "numpy", "tokenizers", "msgspec", "pyzmq", "fastapi", "uvicorn", "aiohttp", "uvloop")


def provenance() -> dict[str, object]:
    """Returns the ``date`` (UTC) and ``environment`` keys of a result line."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": environment(),
    }


def environment() -> dict[str, object]:
    """Returns the commit, package versions, processor and GPUs of this machine; unknown values are None."""
    return {
        "commit": commit_of(Path(radixkv.__file__).resolve().parent),
        "versions": {
            "radixkv": radixkv.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
        "processor": _processor(),
        "cores": n_cores(),
        **_gpus(),
    }


def machine(environment: Mapping[str, object]) -> str:
    """Returns a few words on the machine of an ``environment``, for titles: its GPU, or its processor and cores."""
    name = environment.get("gpu") or environment.get("processor") or "unknown machine"
    cores = environment.get("cores")
    return (
        str(name) if environment.get("gpu") or not cores else f"{name}, {cores} {'core' if cores == 1 else 'cores'}"
    )


def commit_of(package: Path) -> str | None:
    """Returns the checked-out commit of the Git repository that holds a package's folder.

    Appends ``with changes`` if the package has uncommitted changes. None: the installation is no Git checkout.
    """
    if not (package.parent / ".git").exists():
        return None
    git = ["git", "--no-optional-locks", "-C", str(package)]
    try:
        commit, changes = (
            subprocess.run([*git, *command], capture_output=True, text=True, check=True, timeout=10).stdout.strip()
            for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "."))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit} with changes" if changes else commit


def _gpus() -> dict[str, str | None]:
    """Returns GPU names and driver versions from ``nvidia-smi``; only the runtime may import torch."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        output = ""
    pairs = [line.rpartition(", ")[::2] for line in output.splitlines()]
    names, drivers = (" / ".join(sorted({pair[index] for pair in pairs})) for index in (0, 1))
    return {"gpu": names or None, "driver": drivers or None}


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
