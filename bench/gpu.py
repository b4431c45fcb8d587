"""What a measurement on a GPU records beside its times: date, environment, clock and power."""

from __future__ import annotations

import importlib.metadata
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from statistics import median

import torch

from radixkv.bench.environment import environment

PACKAGES = ("triton", "flashinfer-python", "transformers")
QUERY = ("nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "250")


def gpu_provenance(device: str, commit: str | None = None) -> dict[str, object]:
    """Returns the ``date`` and ``environment`` keys of a result line, with the GPU and its packages' versions.

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
    result |= {"gpu": torch.cuda.get_device_name()} if device == "cuda" else {"gpu": None, "driver": None}
    return {"date": date.today().isoformat(), "environment": result}


@contextmanager
def watched_power(is_enabled: bool) -> Iterator[dict[str, float]]:
    """Yields a dictionary that gets ``clock_mhz`` and ``power_w`` when the block ends.

    They are medians of four samples per second. The dictionary stays empty if ``is_enabled`` is false, or the block
    was too short for a sample.
    """
    medians: dict[str, float] = {}
    if not is_enabled:
        yield medians
        return
    with tempfile.TemporaryFile("w+") as log:
        sampler = subprocess.Popen(QUERY, stdout=log)
        try:
            yield medians
        finally:
            sampler.terminate()
            sampler.wait()
        log.seek(0)
        samples = [line.split(",") for line in log.read().splitlines() if line.count(",") == 1]
    if samples:
        medians["clock_mhz"] = median(float(clock) for clock, _ in samples)
        medians["power_w"] = round(median(float(power) for _, power in samples), 1)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
