"""Which device computes, and how it is opened."""

from __future__ import annotations

import gc
import logging
import traceback
from contextlib import suppress
from typing import Literal

import torch

from radixkv.checkpoints import Checkpoint
from radixkv.config import Device, EngineConfig, with_defaults
from radixkv.errors import ConfigError
from radixkv.runtime.device.errors_cuda import is_lack_of_memory
from radixkv.runtime.device.executor_cpu import CpuExecutor, check_for_cpu
from radixkv.runtime.device.machine_cuda import (
    HEAD_SIZES,
    MIN_CAPABILITY,
    Machine,
    check_machine,
    look,
)
from radixkv.runtime.device.preflight_cuda import check_for_cuda
from radixkv.runtime.device.spec.config import DecoderConfig
from radixkv.runtime.step.executor import Executor

logger = logging.getLogger(__name__)


def check_device(setting: Device | Literal["auto"]) -> None:
    """Raises ``ConfigError`` if this machine cannot compute on CUDA and that was asked for. A second at most."""
    if setting == "cuda":
        check_machine(look())


def choose_device(setting: Device | Literal["auto"], checkpoint: Checkpoint) -> Device:
    """The device that a setting means on this machine.

    ``auto`` is CUDA where torch sees a GPU, unless that or the size of the model's heads (of toys, mostly) is none
    that the kernels are built for: then the log says why it is the CPU, and also where there is a driver but torch
    sees no GPU. What else cannot run is an error on CUDA.

    Raises:
        CheckpointError: ``config.json`` is wrong.
    """
    if setting != "auto":
        return setting
    if not torch.cuda.is_available():
        _say_why_not(look())
        return "cpu"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        logger.warning("computing on the CPU: the GPU's compute capability is %d.%d; CUDA needs 8.0", *capability)
        return "cpu"
    head_dim = DecoderConfig.parse(checkpoint.config, checkpoint.folder / "config.json").head_dim
    if head_dim not in HEAD_SIZES:
        logger.warning("computing on the CPU, not on the GPU: heads of size %d are not built for CUDA", head_dim)
        return "cpu"
    return "cuda"


def resolve_config(config: EngineConfig, checkpoint: Checkpoint) -> EngineConfig:
    """The settings with those of the device filled in, if machine and checkpoint fit them.

    Looks at all that can be known before weights are fetched or read. Up to a second.

    Args:
        checkpoint: need not have weights yet.

    Raises:
        CheckpointError: ``config.json`` is wrong, or asks for what is not supported.
        ConfigError: the settings do not fit it, or the machine.
    """
    config = with_defaults(config, choose_device(config.model.device, checkpoint))
    model, cache, scheduler = config.model, config.cache, config.scheduler
    max_model_len = model.max_model_len or checkpoint.max_position_embeddings
    if model.device == "cuda":
        assert scheduler.max_num_seqs is not None
        assert cache.gpu_memory_utilization is not None
        check_for_cuda(
            checkpoint,
            check_machine(look()),
            page_size=cache.page_size,
            max_rows=scheduler.max_num_seqs,
            max_model_len=max_model_len,
            dtype=model.dtype,
            kv_cache_memory_bytes=cache.kv_cache_memory_bytes,
            max_total_tokens=cache.max_total_tokens,
            gpu_memory_utilization=cache.gpu_memory_utilization,
        )
        return config
    assert cache.kv_cache_memory_bytes is not None
    check_for_cpu(
        checkpoint,
        page_size=cache.page_size,
        max_model_len=max_model_len,
        kv_cache_memory_bytes=cache.kv_cache_memory_bytes,
        max_total_tokens=cache.max_total_tokens,
        dtype=model.dtype,
    )
    return config


def open_executor(config: EngineConfig, checkpoint: Checkpoint, max_model_len: int) -> Executor:
    """Loads the model on its device and makes the pool. Seconds.

    Args:
        config: with its device's defaults filled in.
        max_model_len: longest prompt and answer together, in tokens.

    Raises:
        CheckpointError: the checkpoint cannot be run.
        ConfigError: the settings do not fit the checkpoint or the machine.
    """
    model, cache, scheduler = config.model, config.cache, config.scheduler
    assert scheduler.max_num_seqs is not None
    if model.device == "cuda":
        assert scheduler.max_num_batched_tokens is not None
        assert cache.gpu_memory_utilization is not None
        check_device(model.device)
        # Only now: Triton and FlashInfer, which this imports, may not be there.
        from radixkv.runtime.device.factory_cuda import open_cuda_executor

        try:
            return open_cuda_executor(
                checkpoint,
                page_size=cache.page_size,
                max_rows=scheduler.max_num_seqs,
                max_tokens=scheduler.max_num_batched_tokens,
                max_model_len=max_model_len,
                kv_cache_memory_bytes=cache.kv_cache_memory_bytes,
                max_total_tokens=cache.max_total_tokens,
                gpu_memory_utilization=cache.gpu_memory_utilization,
                dtype=model.dtype,
                load_format=model.load_format,
                enforce_eager=model.enforce_eager,
            )
        except BaseException as error:
            lacks_memory = is_lack_of_memory(error)
            _let_go(error)
            if not lacks_memory:
                raise
            raise ConfigError(
                f"there is too little memory: {str(error).splitlines()[0].rstrip('.')}; set "
                "gpu_memory_utilization, max_num_seqs, max_num_batched_tokens or max_model_len lower, take a "
                "smaller model, or end what else uses the GPU"
            ) from None
    assert cache.kv_cache_memory_bytes is not None
    return CpuExecutor(
        checkpoint,
        page_size=cache.page_size,
        max_rows=scheduler.max_num_seqs,
        max_model_len=max_model_len,
        kv_cache_memory_bytes=cache.kv_cache_memory_bytes,
        max_total_tokens=cache.max_total_tokens,
        dtype=model.dtype,
        load_format=model.load_format,
    )


def _let_go(error: BaseException) -> None:
    """Gives back to the GPU what was loaded before the start failed: else the error's traceback would hold it."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    with suppress(torch.AcceleratorError):  # of a lost device nothing is to be had before the process ends
        torch.cuda.empty_cache()


def _say_why_not(machine: Machine) -> None:
    """Where there is a driver the user may think that its GPU computes."""
    if machine.driver_cuda is None:
        return
    try:
        check_machine(machine)
    except ConfigError as error:
        logger.warning("computing on the CPU: %s", error)
