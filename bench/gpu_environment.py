"""The environment of a measurement on a GPU."""

from __future__ import annotations

import importlib.metadata

import torch

from radixkv.bench.environment import environment

PACKAGES = ("triton", "flashinfer-python", "transformers")


def gpu_environment(device: str, commit: str | None = None) -> dict[str, object]:
    """Returns ``environment`` with the GPU and the versions of its packages.

    Args:
        device: ``cuda`` or ``cpu``.
        commit: the commit that is checked out, if the source tree does not tell.
    """
    result = environment()
    versions = result["versions"]
    assert isinstance(versions, dict)
    result["versions"] = {
        **versions,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: _version(name) for name in PACKAGES},
    }
    result["commit"] = commit or result["commit"]
    return result | ({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {"gpu": None, "driver": None})


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
