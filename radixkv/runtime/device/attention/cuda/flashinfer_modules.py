"""Loading of FlashInfer's modules. Prebuilt ones are loaded without FlashInfer's Python package.

The import of that package takes half a second, and 3 s where no byte code is kept. Modules that FlashInfer has
built itself need it: it locks them, and builds them again where their sources changed. Names of modules and the
folders of prebuilt ones are not part of its public interface; ``machine.PACKAGES`` limits FlashInfer to the
releases for which both were read.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from radixkv.runtime.device.attention.cuda.base import AttentionShape
from radixkv.runtime.device.kv_dtype import FP8

FlashInferKernel = Literal["fa2", "fa3"]

logger = logging.getLogger(__name__)

_DTYPE_NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", FP8: "e4m3"}


def load(backend: FlashInferKernel, shape: AttentionShape, is_windowed: bool, capability: tuple[int, ...]) -> Any:
    """Loads the module of a kernel, a ``tvm_ffi.Module``. Compiling takes minutes where it is not built.

    With K and V of 8 bits, FA2 converts them to the queries' dtype, and FA3 takes queries of 8 bits.
    """
    prebuilt = find_prebuilt(name_of(backend, shape, is_windowed), capability)
    if prebuilt is not None:
        import tvm_ffi

        try:
            return tvm_ffi.load_module(str(prebuilt))
        except RuntimeError as error:  # built for another release of CUDA, say
            logger.warning(
                "%s cannot be loaded, so FlashInfer looks for another or compiles it: %s", prebuilt, error
            )
    return spec_of(backend, shape, is_windowed).build_and_load()


def not_compiled(shape: AttentionShape, windows: Sequence[int | None], capability: tuple[int, ...]) -> list[str]:
    """Returns the names of modules that ``load`` would compile for layers with these windows on such a GPU."""
    backend = backend_of(capability)
    kinds = sorted({window is not None for window in windows})
    missing = [kind for kind in kinds if find_prebuilt(name_of(backend, shape, kind), capability) is None]
    specs = [spec_of(backend, shape, kind) for kind in missing]
    return [spec.name for spec in specs if not spec.is_compiled]


def backend_of(capability: tuple[int, ...]) -> FlashInferKernel:
    """Returns the backend of prompts and of large tiles: FA3 on Hopper, which alone supports it, else FA2.

    With K and V of 8 bits FA3 rounds queries and weights of the softmax to 8 bits too. FA2 does not, but converts K
    and V, for which an 8B model's prompts take twice as long.
    """
    return "fa3" if capability == (9, 0) else "fa2"


def spec_of(backend: FlashInferKernel, shape: AttentionShape, is_windowed: bool) -> Any:
    """Returns FlashInfer's own description of a kernel's module, a ``JitSpec``."""
    from flashinfer.jit.attention import modules

    # FlashInfer's own wrappers use FA2's primary modules too, where K and V have the same strides.
    generate = modules.gen_batch_prefill_module if backend == "fa3" else modules._gen_batch_prefill_primary_module
    dim = shape.head_dim
    return generate(
        backend,
        _query_dtype(backend, shape),
        shape.kv_dtype,
        shape.dtype,
        torch.int32,
        dim,
        dim,
        0,
        is_windowed,
        False,
        False,
    )


def name_of(backend: FlashInferKernel, shape: AttentionShape, is_windowed: bool) -> str:
    """Returns the name of a kernel's module."""
    dtypes = _query_dtype(backend, shape), shape.kv_dtype, shape.dtype
    q, kv, o = (_DTYPE_NAMES[dtype] for dtype in dtypes)
    dim, suffix = shape.head_dim, "_sm90" if backend == "fa3" else "_kv_stride_equal"
    return (
        f"batch_prefill_with_kv_cache_dtype_q_{q}_dtype_kv_{kv}_dtype_o_{o}_dtype_idx_i32_head_dim_qk_{dim}_"
        f"head_dim_vo_{dim}_posenc_0_use_swa_{is_windowed}_use_logits_cap_False_f16qk_False{suffix}"
    )


def _query_dtype(backend: FlashInferKernel, shape: AttentionShape) -> torch.dtype:
    return shape.kv_dtype if backend == "fa3" else shape.dtype


def find_prebuilt(name: str, capability: tuple[int, ...]) -> Path | None:
    """Returns the file of a prebuilt module; None if FlashInfer itself must say whether it is built."""
    package = importlib.util.find_spec("flashinfer")
    assert package is not None, "checked by machine"
    folders = [Path(folder, "data", "aot") for folder in package.submodule_search_locations or ()]
    candidates = (folder / name / f"{name}.so" for folder in folders + _provider_folders(name, capability))
    return next((path for path in candidates if path.is_file()), None)


def _provider_folders(name: str, capability: tuple[int, ...]) -> list[Path]:
    """Returns the folders of installed packages that have a module built for exactly this compute capability.

    ``flashinfer-jit-cache`` lists such packages. FlashInfer itself also chooses among builds for older GPUs.
    """
    try:
        release = importlib.metadata.version("flashinfer-jit-cache")
    except importlib.metadata.PackageNotFoundError:
        return []
    if release.partition("+")[0] != importlib.metadata.version("flashinfer-python"):
        return []
    from flashinfer_jit_cache import get_jit_cache_providers

    fitting = [
        provider
        for provider in get_jit_cache_providers()
        if provider.version == release and name in provider.modules
    ]
    major, minor = capability
    architectures = [f"sm{major}{minor}{suffix}" for suffix in ("a", "f", "")]  # the most special build first
    return [
        Path(provider.jit_cache_dir)
        for architecture in architectures
        for provider in fitting
        if architecture in provider.cuda_architectures
    ]
