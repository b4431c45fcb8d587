"""Checks of machine, settings and checkpoint for CUDA, before anything slow starts.

``inspect_machine`` collects the facts; the checks only read them, so that they can be tested on any machine.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import torch

from radixkv.errors import ConfigError
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.model_config.families import ARCHITECTURES
from radixkv.runtime.device.model_support import only_triton
from radixkv.settings.config import AttentionBackend

logger = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)
"""Lowest supported compute capability, Ampere. Older GPUs have no bfloat16."""
MIN_FP8_CAPABILITY = (8, 9)
"""Lowest compute capability whose instructions convert to and from FP8, Ada."""
PAGE_SIZES = (1, 16, 32, 64)
"""Tokens per page that the attention kernels support."""
MAX_ROWS = 1 << 15
"""Most rows of a step. Attention launches up to some 1.25 blocks per row along a grid axis of 65,535."""
MAX_BLOCK_TABLE_ENTRIES = (1 << 31) - 1
"""Most entries of all block tables together: kernels index them with int32."""
MAX_BLOCK_TABLE_TOKENS = (1 << 32) - 1
"""Most tokens of all block tables together: FlashInfer's FA2 kernel indexes them with uint32."""
PACKAGES = {"flashinfer-python": ((0, 7, 2), (0, 7, 3)), "triton": ((3, 6), (3, 8))}
"""Packages of the extra ``cuda``: lowest version, and version to stay below. Keep in step with pyproject.toml. Only
Triton must be there."""

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_INSTALL = "pip install 'radixkv[cuda]'"
_USE_CPU = "set device to cpu"
_USE_TRITON = "set attention_backend to triton"
_SYMMETRIC_MEMORY = "TORCH_SYMMMEM"
"""Variable from which torch takes its way to share the memory of GPUs."""
_GIB = 1 << 30

Version = tuple[int, ...]


@dataclass(frozen=True)
class Gpu:
    """The GPU that torch uses."""

    name: str
    capability: Version
    total_bytes: int
    free_bytes: int
    """At present, not counting what other processes use."""


@dataclass(frozen=True)
class Machine:
    """Facts about the machine that decide whether CUDA can be used."""

    torch: str
    """Torch's version."""
    torch_cuda: Version | None
    """CUDA version that torch is built for; None if torch is built without CUDA."""
    driver_cuda: Version | None
    """Newest CUDA version that the driver supports; None if there is no driver."""
    gpu: Gpu | None
    problem: str
    """Torch's reason for having no GPU; empty if there is one."""
    packages: Mapping[str, str | None]
    """Installed versions of ``PACKAGES``; None if not installed."""
    has_flashinfer_kernels: bool
    """Whether FlashInfer may have prebuilt kernels: FlashInfer alone knows which, and its import takes a while."""
    nvcc: str | None
    """Path of CUDA's compiler; FlashInfer calls it for kernels that are not prebuilt."""
    cxx_compiler: str | None
    """Path of the C++ compiler; FlashInfer calls it along with ``nvcc``."""
    c_compiler: str | None
    """C compiler; Triton calls it once for each kernel."""
    has_python_headers: bool
    """Whether Python.h is installed; Triton includes it in what it compiles."""
    gpu_names: Sequence[str] = ()
    """Names of all GPUs that torch sees, in their order."""
    gpu_index: int = 0
    """Index of ``gpu`` among them."""
    strangers: Sequence[tuple[int, int]] = ()
    """Indexes of each two GPUs of which one cannot access the other's memory, in order."""
    symmetric_memory: str | None = None
    """What the environment makes torch share the memory of GPUs with; None: it does not say."""


def inspect_machine() -> Machine:
    """Collects the facts about this machine. The first call initialises CUDA, which takes a second."""
    problem, gpu, index, names, strangers = "", None, 0, [], []
    try:
        torch.cuda.init()
        gpu, index = _gpu(), torch.cuda.current_device()
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        reaches = torch.cuda.can_device_access_peer
        strangers = [(a, b) for a, b in combinations(range(len(names)), 2) if not (reaches(a, b) and reaches(b, a))]
    except (RuntimeError, AssertionError) as error:  # torch has no narrower ones for this
        problem = str(error).splitlines()[0].rstrip(".")
    return Machine(
        torch=torch.__version__,
        torch_cuda=None if torch.version.cuda is None else version(torch.version.cuda),
        driver_cuda=_driver_cuda(),
        gpu=gpu,
        problem=problem,
        packages={name: _installed(name) for name in PACKAGES},
        has_flashinfer_kernels=_has_flashinfer_kernels(),
        nvcc=_nvcc(),
        c_compiler=os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        has_python_headers=_has_python_headers(),
        cxx_compiler=shutil.which(_cxx_name()),
        gpu_names=names,
        gpu_index=index,
        strangers=strangers,
        symmetric_memory=os.environ.get(_SYMMETRIC_MEMORY),
    )


def check_machine(machine: Machine) -> Gpu:
    """Returns the GPU to use. Raises ``ConfigError`` if it is unusable, or Triton is missing or unsupported."""
    if machine.torch_cuda is None:
        raise ConfigError(
            f"torch {machine.torch} is built without CUDA; install one that is built with it, or {_USE_CPU}"
        )
    if machine.driver_cuda is None:
        raise ConfigError(f"no NVIDIA driver (libcuda.so.1) was found; install one, or {_USE_CPU}")
    # Drivers support older CUDA versions, and newer ones of the same major version.
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
    if problem := _package_problem("triton", machine):
        raise ConfigError(f"{problem}, which CUDA needs; {_INSTALL}, or {_USE_CPU}")
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


def check_gpus(machine: Machine, n_ranks: int, n_replicas: int = 1) -> None:
    """Raises ``ConfigError`` unless there are GPUs for so many replicas of so many ranks, from the first on.

    They must be equal, and those of one replica must access each other's memory.
    """
    names, n_gpus = machine.gpu_names, n_ranks * n_replicas
    wanted = f"tensor_parallel_size {n_ranks}"
    if n_replicas > 1:
        wanted = f"data_parallel_size {n_replicas}" + (f" times {wanted}" if n_ranks > 1 else "")
    if len(names) < n_gpus:
        raise ConfigError(
            f"{wanted} needs as many GPUs, and torch sees {len(names)}; set it lower, or make more visible "
            "(CUDA_VISIBLE_DEVICES)"
        )
    if len(set(names[:n_gpus])) > 1:
        raise ConfigError(
            f"{wanted} needs equal GPUs, and the first {n_gpus} are {', '.join(names[:n_gpus])}; make equal ones "
            "visible (CUDA_VISIBLE_DEVICES)"
        )
    if machine.gpu_index != 0:
        raise ConfigError(
            f"{wanted} takes GPUs from the first on, and this process's current one is {machine.gpu_index}; choose "
            "GPUs with CUDA_VISIBLE_DEVICES"
        )
    if n_ranks == 1:
        return
    for first, second in machine.strangers:
        if second < n_gpus and first // n_ranks == second // n_ranks:
            raise ConfigError(
                f"tensor_parallel_size {n_ranks} needs GPUs that access each other's memory, and {first} and "
                f"{second} do not; choose others with CUDA_VISIBLE_DEVICES, or set it to 1"
            )
    if machine.symmetric_memory not in (None, "CUDA"):
        raise ConfigError(
            f"tensor_parallel_size {n_ranks} shares the memory of GPUs by CUDA alone, and the environment has "
            f"{_SYMMETRIC_MEMORY} {machine.symmetric_memory}; unset it"
        )


def check_attention_backend(setting: AttentionBackend, machine: Machine, config: DecoderConfig) -> None:
    """Raises ``ConfigError`` for FlashInfer where it is missing, unsupported or without kernels for the model."""
    if setting != "flashinfer":
        return
    if problem := only_triton(config):
        raise ConfigError(f"attention_backend is flashinfer, but {problem}; {_USE_TRITON}")
    if problem := _package_problem("flashinfer-python", machine):
        raise ConfigError(f"attention_backend is flashinfer, but {problem}; {_INSTALL}, or {_USE_TRITON}")


def choose_attention_backend(
    setting: AttentionBackend, machine: Machine, not_compiled: Callable[[], Sequence[str]]
) -> Literal["flashinfer", "triton"]:
    """Returns what computes prompts; ``auto`` is FlashInfer where it can be had. The log says what that costs.

    Args:
        setting: the setting.
        machine: the facts about this machine.
        not_compiled: imports FlashInfer, and returns the names of the model's kernels that are not prebuilt. Called
            only where FlashInfer may be chosen.

    Raises:
        ConfigError: ``setting`` is ``flashinfer``, which cannot be had.
    """
    if setting == "triton":
        return "triton"
    problem = _flashinfer_problem(machine, not_compiled)
    if problem is None:
        return "flashinfer"
    if setting == "flashinfer":
        raise ConfigError(f"attention_backend is flashinfer, but {problem}, or {_USE_TRITON}")
    logger.warning(
        "prompts run on a Triton kernel, whose attention takes up to 1.6 times as long as FlashInfer's: %s for "
        "full speed",
        problem,
    )
    return "triton"


def check_kv_cache_dtype(setting: str, gpu: Gpu) -> None:
    """Raises ``ConfigError`` for an FP8 KV cache on a GPU that cannot convert to FP8."""
    if setting != "auto" and gpu.capability < MIN_FP8_CAPABILITY:
        raise ConfigError(
            f"kv_cache_dtype {setting} needs compute capability {_dotted(MIN_FP8_CAPABILITY)} (Ada) or above, and "
            f"{gpu.name} has {_dotted(gpu.capability)}; set it to auto"
        )


def check_fp8_experts(gpu: Gpu) -> None:
    """Raises ``ConfigError`` for experts in FP8 on a GPU that does not multiply in FP8."""
    if gpu.capability < MIN_FP8_CAPABILITY:
        raise ConfigError(
            f"experts in FP8 need compute capability {_dotted(MIN_FP8_CAPABILITY)} (Ada) or above, and "
            f"{gpu.name} has {_dotted(gpu.capability)}; use a checkpoint in 16 bits, or set device to cpu"
        )


def check_page_size(page_size: int) -> None:
    """Raises ``ConfigError`` for a page size that attention does not support."""
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
    """Raises ``ConfigError`` for larger block tables than kernels can index; one padding row is included."""
    n_entries = (max_rows + 1) * -(-max_model_len // page_size)
    tables = f"max_num_seqs {max_rows} block tables of max_model_len {max_model_len} in pages of {page_size} have"
    if n_entries > MAX_BLOCK_TABLE_ENTRIES:
        raise ConfigError(
            f"{tables} more than {MAX_BLOCK_TABLE_ENTRIES} entries; set one of the first two lower, "
            "or page_size higher"
        )
    if n_entries * page_size > MAX_BLOCK_TABLE_TOKENS:
        raise ConfigError(
            f"{tables} room for more than {MAX_BLOCK_TABLE_TOKENS} tokens; set one of the first two lower"
        )


def local_cpus(bus_id: str, root: Path = Path("/")) -> set[int] | None:
    """Returns the CPUs near a PCI device that this process may use; None if there are none, or they are not known.

    Args:
        bus_id: such as ``0000:1b:00.0``.
        root: where ``sys`` is.
    """
    try:
        text = (root / "sys/bus/pci/devices" / bus_id / "local_cpulist").read_text("ascii").strip()
    except OSError:
        return None
    near: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        near.update(range(int(first), int(last or first) + 1))
    return near & os.sched_getaffinity(0) or None


def choose_dtype(setting: str, config: Mapping[str, Any]) -> torch.dtype:
    """Returns the dtype to compute in; ``auto`` takes the checkpoint's own if it has 16 bits, else bfloat16.

    Args:
        setting: ``auto`` or a dtype's name.
        config: the checkpoint's ``config.json``.

    Raises:
        ConfigError: CUDA's kernels do not compute in that dtype, or the model's activations overflow it.
    """
    names = config.get("architectures") or [""]
    architecture = ARCHITECTURES.get(str(names[0]))
    overflows_float16 = architecture is not None and architecture.overflows_float16
    if setting == "auto":
        own = config.get("dtype") or config.get("torch_dtype")  # Transformers 5 and 4
        dtype = _DTYPES.get(str(own), torch.bfloat16)
        return torch.bfloat16 if overflows_float16 else dtype
    if setting == "float16" and overflows_float16:
        raise ConfigError(f"the activations of {names[0]} overflow float16; set dtype to bfloat16")
    if setting not in _DTYPES:
        raise ConfigError(f"dtype {setting} is not supported on CUDA; use bfloat16 or float16, or {_USE_CPU}")
    return _DTYPES[setting]


def check_weights_fit(n_bytes: int, gpu: Gpu) -> None:
    """Raises ``ConfigError`` if the weights alone do not fit the GPU's free memory."""
    if n_bytes > gpu.free_bytes:
        raise ConfigError(
            f"the model's weights take {n_bytes / _GIB:.1f} GiB; {gpu.name} has {gpu.free_bytes / _GIB:.1f} GiB "
            f"free of {gpu.total_bytes / _GIB:.1f}; take a smaller model, or end other processes on the GPU"
        )


def check_adapters_fit(n_bytes: int, weights_bytes: int, max_loras: int, max_rank: int, gpu: Gpu) -> None:
    """Raises ``ConfigError`` if memory of ``n_bytes`` for adapters does not fit the GPU beside the weights."""
    if weights_bytes + n_bytes > gpu.free_bytes:
        raise ConfigError(
            f"{max_loras} adapters of rank {max_rank} (max_loras and max_lora_rank) and a spare one take "
            f"{n_bytes / _GIB:.1f} GiB beside weights of {weights_bytes / _GIB:.1f}; {gpu.name} has "
            f"{gpu.free_bytes / _GIB:.1f} GiB free of {gpu.total_bytes / _GIB:.1f}; set one of them lower"
        )


def check_states_fit(n_bytes: int, weights_bytes: int, max_rows: int, gpu: Gpu) -> None:
    """Raises ``ConfigError`` if states of ``n_bytes`` do not fit the GPU's free memory beside the weights."""
    if weights_bytes + n_bytes > gpu.free_bytes:
        raise ConfigError(
            f"the states of its layers for max_num_seqs {max_rows} and the prefix cache take "
            f"{n_bytes / _GIB:.1f} GiB beside weights of {weights_bytes / _GIB:.1f}; {gpu.name} has "
            f"{gpu.free_bytes / _GIB:.1f} GiB free of {gpu.total_bytes / _GIB:.1f}; set max_num_seqs or "
            "state_memory_bytes lower"
        )


def version(text: str) -> Version:
    """Parses the leading numbers of a version: ``2.11.0+cu130`` -> (2, 11, 0)."""
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
    torch.cuda.empty_cache()  # frees what an earlier engine in this process used
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


def _package_problem(name: str, machine: Machine) -> str | None:
    """Returns what is wrong with a package of ``PACKAGES``; None if nothing is."""
    (minimum, below), installed = PACKAGES[name], machine.packages[name]
    if installed is None:
        return f"{name} is not installed"
    if not minimum <= version(installed) < below:
        return f"{name} {installed} is installed, not at least {_dotted(minimum)} and below {_dotted(below)}"
    return None


def _flashinfer_problem(machine: Machine, not_compiled: Callable[[], Sequence[str]]) -> str | None:
    """Returns why FlashInfer cannot be had, and what to install; None if it can. Logs what it compiles."""
    if problem := _package_problem("flashinfer-python", machine):
        return f"{problem}; {_INSTALL}"
    lacks_compiler = machine.nvcc is None or machine.cxx_compiler is None
    if lacks_compiler and not machine.has_flashinfer_kernels:
        missing = "FlashInfer's kernels are not built"
    elif not (names := not_compiled()):
        return None
    elif lacks_compiler:
        missing = f"{len(names)} of FlashInfer's kernels are not built, the first of them {names[0]}"
    else:
        logger.info("FlashInfer compiles %d of its kernels, once; that takes minutes", len(names))
        return None
    if machine.nvcc is None:
        compiler, remedy = "CUDA's compiler nvcc", "the CUDA toolkit (or set CUDA_HOME)"
    else:
        compiler, remedy = f"the C++ compiler {_cxx_name()}", "one (the package g++, say, or set CXX)"
    return (
        f"{missing}, and {compiler} was not found; install prebuilt ones (flashinfer install-jit-cache-wheel), "
        f"or {remedy}"
    )


def _has_flashinfer_kernels() -> bool:
    """Whether a package of prebuilt kernels is installed, or FlashInfer's cache has a kernel of any kind."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return True
    cache = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home(), ".cache", "flashinfer")
    return any(cache.rglob("*.so"))


def _has_python_headers() -> bool:
    """Looks where Triton does: not below /usr/local, where Debian's packaging scheme points."""
    scheme = sysconfig.get_default_scheme()
    folder = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    return Path(folder, "Python.h").is_file()


def _cxx_name() -> str:
    """Returns the C++ compiler that FlashInfer calls, without flags."""
    return (os.environ.get("CXX", "").split() or ["c++"])[0]


def _nvcc() -> str | None:
    """Returns the path of nvcc, looking where FlashInfer does."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and (found := shutil.which("nvcc")):
        return found
    path = Path(home or "/usr/local/cuda") / "bin" / "nvcc"
    return str(path) if path.is_file() else None
