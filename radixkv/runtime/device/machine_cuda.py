"""What CUDA needs of machine, settings and checkpoint; what is wrong is one line, before anything long starts.

The checks are functions of facts, so that they can be tried without the machine; ``look`` gathers the facts.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import os
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from radixkv.errors import ConfigError
from radixkv.runtime.device.spec.config import DecoderConfig

logger = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)
"""Of a GPU: Ampere. Older ones have no bfloat16."""
HEAD_SIZES = (64, 128, 256)
"""That attention is built for in 16 bits."""
PAGE_SIZES = (1, 16, 32, 64)
"""That attention is built for."""
MAX_HEADS_A_KV_HEAD = {64: 64, 128: 64, 256: 32}
"""By size of head: as many as fit a tile of attention, and 99 KB of shared memory."""
MAX_ROWS = 1 << 15
"""Of a step. Attention launches up to some 1.25 blocks a row along an axis that takes 65,535."""
MAX_ENTRIES = (1 << 31) - 1
"""Of all block tables: kernels number them in int32."""
MAX_TABLE_TOKENS = (1 << 32) - 1
"""Of all block tables: FlashInfer's FA2 numbers the tokens in uint32."""
PACKAGES = {"flashinfer-python": ((0, 6, 12), (0, 6, 13)), "triton": ((3, 6), (3, 8))}
"""What the extra ``cuda`` brings: from a version on, and below another. As in pyproject.toml."""

_SHORT = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPES = {**_SHORT, "float32": torch.float32}
_INSTALL = "pip install 'radixkv[cuda]'"
_USE_CPU = "set device to cpu"
_GIB = 1 << 30

Version = tuple[int, ...]


@dataclass(frozen=True)
class Gpu:
    """The GPU that torch uses."""

    name: str
    capability: Version
    total_bytes: int
    free_bytes: int
    """Now: what other processes have is not in it."""


@dataclass(frozen=True)
class Machine:
    """What the machine says of itself."""

    torch: str
    """Torch's version."""
    torch_cuda: Version | None
    """The CUDA that torch is built for; None: it is built without."""
    driver_cuda: Version | None
    """The newest CUDA that the driver runs; None: there is no driver."""
    gpu: Gpu | None
    problem: str
    """Why there is no GPU, as torch says it."""
    packages: Mapping[str, str | None]
    """Versions of ``PACKAGES``; None: not installed."""
    nvcc: str | None
    """CUDA's compiler, which FlashInfer calls for kernels that are not there compiled."""
    cxx_compiler: str | None
    """Which FlashInfer calls beside ``nvcc``."""
    c_compiler: str | None
    """Which Triton calls once for each kernel."""
    has_python_headers: bool
    """Which Triton includes in what it compiles."""


def look() -> Machine:
    """The facts of this machine. The first call starts CUDA, if there is one: a second."""
    problem, gpu = "", None
    try:
        torch.cuda.init()
        gpu = _gpu()
    except (RuntimeError, AssertionError) as error:  # torch has no narrower ones for this
        problem = str(error).splitlines()[0].rstrip(".")
    return Machine(
        torch=torch.__version__,
        torch_cuda=None if torch.version.cuda is None else version(torch.version.cuda),
        driver_cuda=_driver_cuda(),
        gpu=gpu,
        problem=problem,
        packages={name: _installed(name) for name in PACKAGES},
        nvcc=_nvcc(),
        c_compiler=os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        has_python_headers=_has_python_headers(),
        cxx_compiler=shutil.which(_cxx_name()),
    )


def check_machine(machine: Machine) -> Gpu:
    """The GPU that is to be used. Raises ``ConfigError`` if it cannot be, or a package is missing or unknown."""
    if machine.torch_cuda is None:
        raise ConfigError(
            f"torch {machine.torch} is built without CUDA; install one that is built with it, or {_USE_CPU}"
        )
    if machine.driver_cuda is None:
        raise ConfigError(f"no NVIDIA driver (libcuda.so.1) was found; install one, or {_USE_CPU}")
    # Drivers run what was built for an older CUDA, and for a newer one of the same major version.
    if machine.driver_cuda[0] < machine.torch_cuda[0]:
        raise ConfigError(
            f"the NVIDIA driver runs CUDA up to {_dotted(machine.driver_cuda)}, and torch {machine.torch} needs "
            f"{_dotted(machine.torch_cuda)}; update the driver, or take a torch for CUDA {machine.driver_cuda[0]}"
        )
    gpu = machine.gpu
    if gpu is None:
        raise ConfigError(f"CUDA cannot be used: {machine.problem}; make a GPU visible, or {_USE_CPU}")
    if gpu.capability < MIN_CAPABILITY:
        raise ConfigError(
            f"{gpu.name} has compute capability {_dotted(gpu.capability)}; this release needs "
            f"{_dotted(MIN_CAPABILITY)} (Ampere) or above; {_USE_CPU}"
        )
    for name, (least, below) in PACKAGES.items():
        installed = machine.packages[name]
        if installed is None:
            raise ConfigError(f"{name} is not installed, which CUDA needs: {_INSTALL}, or {_USE_CPU}")
        if not least <= version(installed) < below:
            raise ConfigError(
                f"{name} {installed} is installed; CUDA needs at least {_dotted(least)} and below "
                f"{_dotted(below)}: {_INSTALL}, or {_USE_CPU}"
            )
    if machine.c_compiler is None:
        raise ConfigError(
            f"Triton needs a C compiler, and neither gcc nor clang is there; install one, or {_USE_CPU}"
        )
    if not machine.has_python_headers:
        raise ConfigError(
            "Triton needs Python's headers, and Python.h is not there; install the package with them (python3-dev, "
            f"say), or {_USE_CPU}"
        )
    return gpu


def check_compiled(missing: Sequence[str], machine: Machine) -> None:
    """Says what FlashInfer will compile. Raises ``ConfigError`` if it cannot.

    Args:
        missing: names of those that are not there compiled.
    """
    if missing and machine.nvcc is None:
        raise ConfigError(
            f"FlashInfer must compile {len(missing)} of its kernels, which takes minutes and CUDA's compiler, but "
            "no nvcc was found; install the CUDA toolkit (or set CUDA_HOME), install the package "
            f"flashinfer-jit-cache, or {_USE_CPU}; the first is {missing[0]}"
        )
    if missing and machine.cxx_compiler is None:
        raise ConfigError(
            f"FlashInfer must compile {len(missing)} of its kernels, which takes a C++ compiler too, but no "
            f"{_cxx_name()} was found; install one (the package g++, say, or set CXX), install the package "
            f"flashinfer-jit-cache, or {_USE_CPU}; the first is {missing[0]}"
        )
    if missing:
        logger.info("FlashInfer compiles %d of its kernels, once; that takes minutes", len(missing))


def check_max_model_len(max_model_len: int, limit: int) -> None:
    """Raises ``ConfigError`` for a context that the checkpoint does not have; ``limit`` is its own."""
    if not 1 <= max_model_len <= limit:
        raise ConfigError(f"max_model_len {max_model_len} must be between 1 and the checkpoint's {limit}")


def check_page_size(page_size: int) -> None:
    """Raises ``ConfigError`` for a page that attention is not built for."""
    if page_size not in PAGE_SIZES:
        *some, last = PAGE_SIZES
        raise ConfigError(
            f"page_size {page_size} is not supported on CUDA; use {', '.join(map(str, some))} or {last}"
        )


def check_max_num_seqs(max_rows: int) -> None:
    """Raises ``ConfigError`` for more rows than attention can be launched for."""
    if max_rows > MAX_ROWS:
        raise ConfigError(f"max_num_seqs {max_rows} is more than CUDA's kernels take; set it to at most {MAX_ROWS}")


def check_block_tables(max_rows: int, max_model_len: int, page_size: int) -> None:
    """Raises ``ConfigError`` for more block tables than kernels can number, one row that pads included."""
    n_entries = (max_rows + 1) * -(-max_model_len // page_size)
    tables = f"max_num_seqs {max_rows} block tables of max_model_len {max_model_len} in pages of {page_size} have"
    if n_entries > MAX_ENTRIES:
        raise ConfigError(
            f"{tables} more than {MAX_ENTRIES} entries; set one of the first two lower, or page_size higher"
        )
    if n_entries * page_size > MAX_TABLE_TOKENS:
        raise ConfigError(f"{tables} room for more than {MAX_TABLE_TOKENS} tokens; set one of the first two lower")


def check_model(config: DecoderConfig, dtype: torch.dtype) -> None:
    """Raises ``ConfigError`` for a checkpoint that runs on the CPU only, or in float32 only."""
    head_dim = config.head_dim
    is_power_of_two = head_dim & (head_dim - 1) == 0
    if head_dim not in HEAD_SIZES and not (dtype is torch.float32 and is_power_of_two):
        *some, last = HEAD_SIZES
        remedy = "set dtype to float32, or device to cpu" if is_power_of_two else _USE_CPU
        raise ConfigError(
            f"this {config.architecture} has heads of size {head_dim}; CUDA's kernels are built for "
            f"{', '.join(map(str, some))} and {last}, and in float32 for powers of two; {remedy}"
        )
    if dtype is not torch.float32 and config.n_heads // config.n_kv_heads > (most := MAX_HEADS_A_KV_HEAD[head_dim]):
        raise ConfigError(
            f"this {config.architecture} has {config.n_heads} heads for {config.n_kv_heads} KV heads; CUDA's "
            f"kernels are built for up to {most} heads of size {head_dim} a KV head; set dtype to float32, or "
            "device to cpu"
        )
    if any(config.experts_of(layer) for layer in range(config.n_layers)):
        raise ConfigError(
            f"this {config.architecture} has experts, which this release does not run on CUDA; {_USE_CPU}"
        )


def choose_dtype(setting: str, config: Mapping[str, Any]) -> torch.dtype:
    """What the model computes in: as set, or for ``auto`` the checkpoint's own if that has 16 bits, else bfloat16.

    Args:
        config: the checkpoint's ``config.json``.
    """
    if setting == "auto":
        own = config.get("dtype") or config.get("torch_dtype")  # Transformers 5 and 4
        return _SHORT.get(str(own), torch.bfloat16)
    return _DTYPES[setting]


def check_weights_fit(n_bytes: int, gpu: Gpu) -> None:
    """Before anything is read. Raises ``ConfigError`` if the weights alone do not fit."""
    if n_bytes > gpu.free_bytes:
        raise ConfigError(
            f"the model's weights take {n_bytes / _GIB:.1f} GiB; {gpu.name} has {gpu.free_bytes / _GIB:.1f} GiB "
            f"free of {gpu.total_bytes / _GIB:.1f}; take a smaller model, or end what else uses the GPU"
        )


def version(text: str) -> Version:
    """The leading numbers of a version: ``2.11.0+cu130`` -> (2, 11, 0)."""
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = part[: next((i for i, c in enumerate(part) if not c.isdigit()), len(part))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def _dotted(numbers: Version) -> str:
    return ".".join(map(str, numbers))


def _gpu() -> Gpu:
    torch.cuda.empty_cache()  # what an engine before this one had in this process is free
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return Gpu(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), total_bytes, free_bytes)


def _driver_cuda() -> Version | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_python_headers() -> bool:
    """Where Triton looks: not below /usr/local, as Debian's scheme for packages would have it."""
    scheme = sysconfig.get_default_scheme()
    folder = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    return Path(folder, "Python.h").is_file()


def _cxx_name() -> str:
    """What FlashInfer calls, without flags."""
    return (os.environ.get("CXX", "").split() or ["c++"])[0]


def _nvcc() -> str | None:
    """Where FlashInfer looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and (found := shutil.which("nvcc")):
        return found
    path = Path(home or "/usr/local/cuda") / "bin" / "nvcc"
    return str(path) if path.is_file() else None
