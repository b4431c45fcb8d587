"""What a run on a GPU was measured on."""

from __future__ import annotations

import importlib.metadata

import torch

from radixkv.bench.environment import environment

PACKAGES = ("triton", "flashinfer-python", "transformers")


def gpu_environment(device: str, commit: str | None = None) -> dict[str, object]:
    """``environment`` with the GPU, its driver and the packages that drive it.

    Args:
        device: ``cuda`` or ``cpu``.
        commit: what was checked out, where the source tree does not say it.
    """
    found = environment()
    versions = found["versions"]
    assert isinstance(versions, dict)
    found["versions"] = {
        **versions,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: _version(name) for name in PACKAGES},
    }
    found["commit"] = commit or found["commit"]
    return found | ({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {"gpu": None, "driver": None})


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
