"""What a measurement on a GPU records beside its times: date, environment, energy, clock and power."""

from __future__ import annotations

import ctypes
import importlib.metadata
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import date
from statistics import median

import torch

from radixkv.lab.bench.environment import environment

PACKAGES = ("triton", "flashinfer-python", "cuda-bindings", "transformers")
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
    """Yields a dictionary that gets measures of the GPU when the block ends.

    ``energy_j`` is from the GPU's own counter, if it has one; the counter moves some ten times per second. If
    ``is_enabled``, ``clock_mhz`` and ``power_w`` are medians of four samples per second; a block may be too short
    for one.
    """
    measures: dict[str, float] = {}
    counter = EnergyCounter.open()
    begun_j = None if counter is None else counter.read_j()
    with _sampled(measures) if is_enabled else nullcontext():
        yield measures
    if counter is not None and begun_j is not None:
        measures["energy_j"] = round(counter.read_j() - begun_j, 1)


@contextmanager
def _sampled(medians: dict[str, float]) -> Iterator[None]:
    with tempfile.TemporaryFile("w+") as log:
        sampler = subprocess.Popen(QUERY, stdout=log)
        try:
            yield
        finally:
            sampler.terminate()
            sampler.wait()
        log.seek(0)
        samples = [line.split(",") for line in log.read().splitlines() if line.count(",") == 1]
    if samples:
        medians["clock_mhz"] = median(float(clock) for clock, _ in samples)
        medians["power_w"] = round(median(float(power) for _, power in samples), 1)


class EnergyCounter:
    """The energy that a GPU has used since its driver was loaded, as NVML counts it.

    Args:
        library: NVML, initialised.
        device: NVML's handle of the GPU.
    """

    def __init__(self, library: ctypes.CDLL, device: ctypes.c_void_p) -> None:
        self._library = library
        self._device = device

    @classmethod
    def open(cls) -> EnergyCounter | None:
        """Returns the counter of torch's current GPU; None if there is no GPU, or it has no counter."""
        if not torch.cuda.is_available():
            return None
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return None
        device = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(device)):
            return None
        counter = cls(library, device)
        return (
            None
            if library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(ctypes.c_ulonglong()))
            else counter
        )

    def read_j(self) -> float:
        """Returns the joules."""
        millijoules = ctypes.c_ulonglong()
        failed = self._library.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(millijoules))
        assert not failed, f"NVML's energy counter worked before, and now returns {failed}"
        return millijoules.value / 1e3


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
