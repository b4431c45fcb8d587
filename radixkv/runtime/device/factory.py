"""Choice and construction of the device that computes the model."""

from __future__ import annotations

import gc
import logging
import traceback
from contextlib import suppress
from dataclasses import replace
from typing import Literal

import msgspec
import torch

from radixkv.checkpoints import Checkpoint
from radixkv.errors import ConfigError
from radixkv.runtime.device.adapters.sources import DEFAULT_MAX_LORAS, find_adapters
from radixkv.runtime.device.collectives import CONNECT_TIMEOUT_S, RankGroup
from radixkv.runtime.device.cpu.executor import CpuExecutor, check_for_cpu
from radixkv.runtime.device.cuda.errors import is_out_of_memory
from radixkv.runtime.device.cuda.model_size import model_size
from radixkv.runtime.device.cuda.preflight import check_for_cuda
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.machine import (
    MIN_CAPABILITY,
    Gpu,
    Machine,
    check_attention_backend,
    check_gpus,
    check_machine,
    inspect_machine,
)
from radixkv.runtime.device.memory.slab_shape import are_mixed
from radixkv.runtime.device.memory_check import require_host_memory
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.model_support import HEAD_SIZES, has_expert_groups, unsupported_state_sizes
from radixkv.runtime.device.ops.cpu.collectives import GlooCollectives
from radixkv.runtime.device.resolved_config import (
    GPU_MEMORY_UTILIZATION,
    ResolvedConfig,
    StateRoom,
    with_defaults,
)
from radixkv.runtime.device.start_times import StartTimes
from radixkv.runtime.step.executor import Executor
from radixkv.settings.config import AdapterConfig, Device, EngineConfig
from radixkv.settings.speculative import DEFAULT_SPECULATION
from radixkv.settings.tenants import check_rows

logger = logging.getLogger(__name__)


def look_at_machine(setting: Device | Literal["auto"]) -> Machine | None:
    """Looks at this machine, unless ``setting`` is ``cpu``. Takes a second at most.

    Raises:
        ConfigError: ``setting`` is ``cuda`` and this machine cannot compute on CUDA.
    """
    if setting == "cpu":
        return None
    machine = inspect_machine()
    if setting == "cuda":
        check_machine(machine)
    return machine


def choose_device(setting: Device | Literal["auto"], checkpoint: Checkpoint, machine: Machine | None) -> Device:
    """Returns the device that ``setting`` stands for on this machine.

    ``auto`` is CUDA if torch sees a GPU. It is the CPU if torch sees none, or if the kernels do not support that
    GPU, the model's head size (mostly of toy models) or its layers. The log says why if a GPU or its driver is
    present. Other obstacles to running on CUDA do not change the choice; they are reported as errors.

    Raises:
        CheckpointError: ``config.json`` is invalid.
    """
    if setting != "auto":
        return setting
    assert machine is not None
    if machine.gpu is None:
        _warn_of_unusable_driver(machine)
        return "cpu"
    if machine.gpu.capability < MIN_CAPABILITY:
        logger.warning(
            "computing on the CPU: the GPU's compute capability is %d.%d; CUDA needs 8.0", *machine.gpu.capability
        )
        return "cpu"
    model = DecoderConfig.parse(checkpoint.config, checkpoint.folder / "config.json")
    for _, head_dim in model.head_shapes:
        if head_dim not in HEAD_SIZES:
            logger.warning("computing on the CPU: heads of size %d are not supported on CUDA", head_dim)
            return "cpu"
    if (recurrent := model.recurrent) is not None and (sizes := unsupported_state_sizes(recurrent)):
        logger.warning("computing on the CPU: %s of size %d are not supported on CUDA", recurrent.title, sizes[0])
        return "cpu"
    if has_expert_groups(model):
        logger.warning("computing on the CPU: groups of experts are not supported on CUDA")
        return "cpu"
    return "cuda"


def resolve_config(config: EngineConfig, checkpoint: Checkpoint, machine: Machine | None) -> ResolvedConfig:
    """Resolves the settings and checks all that is known before the weights are downloaded or read.

    Args:
        config: as the user gave them.
        checkpoint: checkpoint to run; its weights may still be missing.
        machine: as ``look_at_machine`` returned it for ``config.model.device``.

    Raises:
        CheckpointError: ``config.json`` is invalid or not supported.
        ConfigError: the settings do not fit the checkpoint or the machine.
    """
    device = choose_device(config.model.device, checkpoint, machine)
    limit = checkpoint.max_position_embeddings
    model = DecoderConfig.parse(checkpoint.config, checkpoint.folder / "config.json")
    has_states, room = model.recurrent is not None, None
    if has_states and device == "cuda":
        assert machine is not None
        room = _state_room(config, checkpoint, check_machine(machine))
    resolved = with_defaults(config, device, limit, machine, has_states=has_states, room=room)
    settings = resolved.device_settings
    if settings.max_model_len > limit:
        raise ConfigError(f"max_model_len {settings.max_model_len} must be between 1 and the checkpoint's {limit}")
    if are_mixed(model.windows_within(settings.max_model_len)):
        excluding = _excludes_window_pages(config, model, settings.max_model_len)
        if excluding is None:
            settings = msgspec.structs.replace(settings, has_window_pages=True)
            resolved = replace(resolved, device_settings=settings)
        else:
            logger.info("all pages of layers with windows are kept: %s", excluding)
    adapters = find_adapters(config.adapters, model, n_ranks=settings.tensor_parallel_size, task=settings.task)
    if config.adapters.has_adapters:
        settings = msgspec.structs.replace(
            settings,
            has_adapters=True,
            max_lora_rank=config.adapters.max_lora_rank,
            max_loras=_max_loras(config.adapters, device),
            adapters=adapters,
        )
        resolved = replace(resolved, device_settings=settings)
    check_rows(config.tenants, settings.max_num_seqs)
    if config.cache.host_memory_bytes is not None:
        require_host_memory(config.cache.host_memory_bytes)
    if model.recurrent is not None:
        _check_states(config, checkpoint.folder.name, model.recurrent.title)
    elif config.cache.state_memory_bytes is not None:
        raise ConfigError(
            f"state_memory_bytes is {config.cache.state_memory_bytes}, and {checkpoint.folder.name} has no "
            "recurrent layers; leave it out"
        )
    if device == "cuda":
        assert machine is not None
        if settings.tensor_parallel_size > 1:
            check_gpus(machine, settings.tensor_parallel_size)
        check_attention_backend(settings.attention_backend, machine, model)
        check_for_cuda(checkpoint, check_machine(machine), settings)
    else:
        if settings.attention_backend != "auto":
            raise ConfigError(
                f"attention_backend {settings.attention_backend} is for CUDA, and the device in use is the CPU; "
                "set it to auto"
            )
        if config.cache.gpu_memory_utilization is not None:
            _warn_of_ignored_utilization(settings)
        check_for_cpu(checkpoint, settings)
    return resolved


def _max_loras(config: AdapterConfig, device: Device) -> int | None:
    """Returns how many adapters rows of a step may have; None: any number."""
    if config.max_loras is not None or device == "cpu":
        return config.max_loras
    return min(DEFAULT_MAX_LORAS, config.max_cpu_loras or DEFAULT_MAX_LORAS)


def _state_room(config: EngineConfig, checkpoint: Checkpoint, gpu: Gpu) -> StateRoom:
    """Returns the room for states on a GPU, which has that beside the weights, and nothing else yet."""
    size = model_size(checkpoint, config.model.quantization, config.model.tensor_parallel_size, reads_files=False)
    share = config.cache.gpu_memory_utilization
    usable_bytes = int(gpu.total_bytes * (GPU_MEMORY_UTILIZATION if share is None else share))
    return StateRoom(size.state_bytes, max(0, min(usable_bytes, gpu.free_bytes) - size.weight_bytes))


def _excludes_window_pages(config: EngineConfig, model: DecoderConfig, max_model_len: int) -> str | None:
    """Returns what an engine has that works with pages of all layers only, in this release; None if nothing."""
    cases = {
        "tenants have shares of pages": any(one.has_page_share for one in config.tenants),
        "K and V have several shapes in layers with windows, or in the others": (
            not model.has_one_shape_of_each_kind(max_model_len)
        ),
    }
    return next((what for what, is_so in cases.items() if is_so), None)


def _check_states(config: EngineConfig, name: str, title: str) -> None:
    """Raises ``ConfigError`` for what a model with states cannot do in this release; ``title`` names its layers."""
    model = f"{name} has {title}"
    if config.scheduler.speculative_config not in (None, DEFAULT_SPECULATION):
        raise ConfigError(
            f"{model}, whose states cannot go back from a wrong draft; leave speculative_config out, or set it to "
            "off"
        )


def choose_for_ranks(
    device: Device, machine: Machine | None, settings: DeviceSettings, checkpoint: Checkpoint
) -> DeviceSettings:
    """Returns the settings with what a rank would choose by what is installed: all have the same then.

    Imports the device's kernels. Reads no weights.

    Args:
        device: of the ranks.
        machine: with a usable GPU; not needed for the CPU.
        settings: all of the device.
        checkpoint: its ``config.json`` is enough.

    Raises:
        CheckpointError: ``config.json`` is invalid or not supported.
        ConfigError: the attention backend that the settings name cannot be had.
    """
    if device == "cpu":
        return settings
    assert machine is not None
    from radixkv.runtime.device.cuda.factory import with_attention_backend

    return with_attention_backend(checkpoint, machine, settings)


def open_executor(
    device: Device,
    machine: Machine | None,
    settings: DeviceSettings,
    checkpoint: Checkpoint,
    times: StartTimes,
    group: RankGroup | None = None,
) -> Executor:
    """Loads the model on its device and allocates the KV pool. Takes seconds.

    Args:
        device: which to open.
        machine: with a usable GPU; not needed for the CPU.
        settings: all of the device.
        checkpoint: checkpoint with its weights.
        times: gets the times of the stages.
        group: of the ranks, of which this process is one; None: it computes the model alone.

    Raises:
        CheckpointError: the checkpoint cannot be run.
        ConfigError: the settings do not fit the checkpoint or the machine, or another rank cannot compute.
        DeviceError: the devices of the ranks do not connect.
    """
    if device == "cuda":
        assert machine is not None
        # Imported here because it imports Triton, which may not be installed.
        from radixkv.runtime.device.cuda.factory import open_cuda_executor

        times.end("imports of kernels")
        try:
            return open_cuda_executor(checkpoint, machine, settings, times, group)
        except BaseException as error:
            out_of_memory = is_out_of_memory(error)
            _release_gpu_memory(error)
            if not out_of_memory:
                raise
            raise ConfigError(
                f"there is too little memory: {str(error).splitlines()[0].rstrip('.')}; set "
                "gpu_memory_utilization, max_num_seqs, max_num_batched_tokens or max_model_len lower, use a "
                "smaller model, or stop other programs that use the GPU"
            ) from None
    if group is None:
        executor = CpuExecutor(checkpoint, settings)
        times.end("weights and pool")
        return executor
    collectives = GlooCollectives(group.rank, group.size)
    executor = CpuExecutor(checkpoint, settings, collectives)
    times.end("weights and pool")
    with group.connecting() as store:
        collectives.connect(store, CONNECT_TIMEOUT_S)
    group.watch(lambda: None)  # gloo's waits end with the processes of the others
    return executor


def _release_gpu_memory(error: BaseException) -> None:
    """Frees the GPU memory that was allocated before the start failed, which the error's traceback still holds."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    with suppress(torch.AcceleratorError):  # a lost device frees its memory only when the process ends
        torch.cuda.empty_cache()


def _warn_of_ignored_utilization(settings: DeviceSettings) -> None:
    n_bytes, n_tokens = settings.kv_cache_memory_bytes, settings.max_total_tokens
    logger.warning(
        "gpu_memory_utilization %g has no effect on the CPU, the device in use: there %s bounds the KV pool",
        settings.gpu_memory_utilization,
        f"kv_cache_memory_bytes, {n_bytes}," if n_tokens is None else f"max_total_tokens, {n_tokens},",
    )


def _warn_of_unusable_driver(machine: Machine) -> None:
    """Logs why the GPU is not used if there is a driver: the user may expect it to be used."""
    if machine.driver_cuda is None:
        return
    try:
        check_machine(machine)
    except ConfigError as error:
        logger.warning("computing on the CPU: %s", error)
