"""Opening of the GPU executor: checks, weights, memory, graphs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Literal

import msgspec
import torch

from radixkv.checkpoints import Checkpoint
from radixkv.runtime.device.adapters.base_model import BaseModel
from radixkv.runtime.device.adapters.cuda.opened import OpenedAdapters
from radixkv.runtime.device.attention.cuda.base import AttentionShape
from radixkv.runtime.device.attention.cuda.flashinfer_modules import not_compiled
from radixkv.runtime.device.attention.cuda.shaped import open_attention
from radixkv.runtime.device.collectives import CONNECT_TIMEOUT_S, OneRank, RankGroup
from radixkv.runtime.device.cuda.executor import MAX_PROMPT_LOGPROB_ROWS, CudaExecutor
from radixkv.runtime.device.cuda.model_runner import ModelRunner
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.graphs.memory_size import driver_bytes
from radixkv.runtime.device.kv_dtype import choose_kv_dtype, scales_text
from radixkv.runtime.device.machine import (
    MIN_FP8_CAPABILITY,
    Machine,
    check_attention_backend,
    check_machine,
    choose_attention_backend,
    choose_dtype,
)
from radixkv.runtime.device.memory.cuda.kv_pool import CudaPool
from radixkv.runtime.device.memory.cuda.pool_size import measure_memory, plan_pages
from radixkv.runtime.device.memory.cuda.recurrent_states import CudaStates
from radixkv.runtime.device.memory.cuda.staging import StagingLayout
from radixkv.runtime.device.memory.page_scores import PageScores
from radixkv.runtime.device.memory.page_shape import PageLayout
from radixkv.runtime.device.memory.slab_shape import empty_slabs, open_slabs
from radixkv.runtime.device.memory.state_size import count_states
from radixkv.runtime.device.model.decoder import Decoder
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.model_config.states import RecurrentConfig
from radixkv.runtime.device.model_support import only_triton
from radixkv.runtime.device.ops.base import Operations
from radixkv.runtime.device.ops.cuda.collectives import CudaCollectives
from radixkv.runtime.device.ops.cuda.delta_net import blocks as delta_net_blocks
from radixkv.runtime.device.ops.cuda.divided_head import DividedHead
from radixkv.runtime.device.ops.cuda.mamba2 import blocks as mamba2_blocks
from radixkv.runtime.device.ops.cuda.operations import CudaOperations
from radixkv.runtime.device.ops.cuda.summed import CudaSummed, CudaSummedExperts
from radixkv.runtime.device.ops.summed import SummedOperations
from radixkv.runtime.device.pack import Packer
from radixkv.runtime.device.sampling.cuda.sampler import CudaSampler
from radixkv.runtime.device.start_times import StartTimes
from radixkv.runtime.device.weights.open import open_weights
from radixkv.runtime.device.weights.shards import Shard

logger = logging.getLogger(__name__)

_GIB = 1 << 30


def open_cuda_executor(
    checkpoint: Checkpoint,
    machine: Machine,
    settings: DeviceSettings,
    times: StartTimes,
    group: RankGroup | None = None,
) -> CudaExecutor:
    """Loads the model onto the current GPU, gives the remaining memory to the KV pool, and captures CUDA graphs.

    Args:
        checkpoint: the model; ``check_for_cuda`` has found that it and the settings fit the machine.
        machine: with a usable GPU.
        settings: all of the device.
        times: gets the times of the stages.
        group: of the ranks, of which this process is one; None: it computes the model alone.

    Raises:
        CheckpointError: the checkpoint cannot be run.
        ConfigError: a setting, the checkpoint or the machine is unsuitable, or another rank cannot compute.
        DeviceError: the GPUs of the ranks do not connect.
    """
    gpu = check_machine(machine)
    device = torch.device("cuda", torch.cuda.current_device())
    stream = torch.cuda.Stream(device)
    with torch.inference_mode(), torch.cuda.stream(stream):
        torch_dtype = choose_dtype(settings.dtype, checkpoint.config)
        kv_dtype = choose_kv_dtype(settings.kv_cache_dtype, torch_dtype)
        has_fp8 = gpu.capability >= MIN_FP8_CAPABILITY
        shard = None if group is None else Shard(group.rank, group.size)
        with open_weights(
            checkpoint,
            load_format=settings.load_format,
            dtype=torch_dtype,
            device=device,
            quantization=settings.quantization,
            products=("fp8", "int4"),
            shard=shard,
            divides_head=True,
        ) as weights:
            config = weights.config
            kv_scales = None if kv_dtype == torch_dtype else weights.kv_scales()
            shapes = _attention_shapes(config, settings, torch_dtype)
            windows = config.windows_within(settings.max_model_len)
            backend = _choose_backend(config, settings, machine, shapes[0], windows)
            logger.info("loading %.1f GiB of weights onto %s", weights.n_bytes / _GIB, gpu.name)
            if weights.has_fp8 and not has_fp8:
                logger.warning(
                    "%s, of compute capability %d.%d, does not multiply in FP8: the weights stay in FP8 and are "
                    "converted while they are read, which saves memory but is slow with prompts",
                    gpu.name,
                    *gpu.capability,
                )
            cuda_operations = CudaOperations(config, settings.max_model_len, device, has_fp8=has_fp8)
            operations: Operations = cuda_operations
            opened: OpenedAdapters | None = None
            if settings.has_adapters:
                model = BaseModel.of_checkpoint(checkpoint, shard)
                opened = OpenedAdapters(settings, model, cuda_operations, torch_dtype, stream)
                operations = opened.operations
            collectives = None
            if group is not None:
                collectives = CudaCollectives(group.rank, group.size)
                operations = SummedOperations(
                    operations,
                    partial(CudaSummed, collectives),
                    partial(CudaSummedExperts, collectives),
                    partial(DividedHead, collectives, operations.linear, config.vocab_size),
                )
            decoder = Decoder(weights, operations, kv_scales)
        times.end("weights")
        if opened is not None:
            opened.load()
            times.end("adapters")
        if collectives is not None and group is not None:
            _connect(collectives, group, settings, config, torch_dtype)
            times.end("other ranks")
        page = PageLayout.of(config, settings.page_size, kv_dtype)
        layout = StagingLayout()
        attention = open_attention(
            shapes,
            windows,
            max_rows=settings.max_num_seqs,
            layout=layout,
            device=device,
            kv_scales=kv_scales,
            sinks=decoder.sinks,
            prefill_kernel="triton" if backend == "triton" else None,
        )
        states = None
        if (recurrent := config.recurrent) is not None:
            n_states = count_states(recurrent, torch_dtype, settings)
            states = CudaStates(recurrent, settings.max_num_seqs, n_states, torch_dtype, device)
        step_adapters = None if opened is None else opened.step
        runner = ModelRunner(
            decoder, attention, layout, settings, stream, collectives or OneRank(), states, step_adapters
        )
        sampler = CudaSampler(settings.max_num_seqs, config.vocab_size, device)
        sampler.warm_up(torch_dtype)
        times.end("sampler")
        no_slabs = empty_slabs(page, windows) if settings.has_window_pages else None
        runner.open_pool(page, 0, no_slabs)
        step_bytes = runner.measure_largest() + runner.logits_bytes
        if recurrent is not None:  # a row may begin and end within blocks
            step_bytes += 2 * settings.max_num_seqs * _block_bytes(recurrent, torch_dtype)
        times.end("largest step")
        graph_bytes = _graph_bytes(runner, config.n_layers, 0 if opened is None else opened.n_products)
        times.end("memory of graphs")
        runner.open_pool(page, 0, no_slabs)
        torch.cuda.empty_cache()
        n_pages = plan_pages(page, measure_memory(device, step_bytes + graph_bytes), settings)
        if group is not None:
            n_pages = group.minimum(n_pages)
        slabs = open_slabs(page, windows, n_pages, settings)
        runner.open_pool(page, n_pages, slabs)
        if slabs is None and no_slabs is not None:
            runner.measure_largest()  # compiles for pages of all layers what was compiled for slabs
        n_pages = runner.pool.n_pages
        logger.info("the KV pool holds %d tokens", n_pages * settings.page_size)
        times.end("pool")
        runner.capture(runner.decode_sizes)
        runner.capture_piecewise(runner.piecewise_sizes)
        times.end("graphs")
    adapters = None if opened is None else opened.adapters
    return CudaExecutor(
        runner,
        Packer(
            settings,
            n_pages,
            settings.max_num_batched_tokens,
            count_split=runner.count_split,
            adapters={} if adapters is None else adapters.slots,
        ),
        sampler,
        vocab_size=config.vocab_size,
        stream=stream,
        kv_scales=scales_text(kv_dtype, kv_scales or ()),
        windows=windows,
        window_pool=None if slabs is None else slabs.pool,
        adapters=adapters,
        page_scores=PageScores(runner.pool.parts, page, kv_scales) if isinstance(runner.pool, CudaPool) else None,
    )


def with_attention_backend(checkpoint: Checkpoint, machine: Machine, settings: DeviceSettings) -> DeviceSettings:
    """Returns the settings with the attention backend that ``auto`` stands for. Imports FlashInfer if it may be.

    Args:
        checkpoint: its ``config.json`` is enough.
        machine: with a usable GPU.
        settings: all of the device.

    Raises:
        CheckpointError: ``config.json`` is invalid or not supported.
        ConfigError: the backend that the settings name cannot be had.
    """
    config = DecoderConfig.parse(checkpoint.config, checkpoint.folder / "config.json")
    config = config.shard(settings.tensor_parallel_size)
    shapes = _attention_shapes(config, settings, choose_dtype(settings.dtype, checkpoint.config))
    backend = _choose_backend(config, settings, machine, shapes[0], config.windows_within(settings.max_model_len))
    return msgspec.structs.replace(settings, attention_backend=backend)


def _block_bytes(config: RecurrentConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of what one block of a prompt takes in a layer with states."""
    if config.mamba2 is not None:
        return mamba2_blocks.block_bytes(config)
    return delta_net_blocks.block_bytes(config, dtype)


def _attention_shapes(config: DecoderConfig, settings: DeviceSettings, dtype: torch.dtype) -> list[AttentionShape]:
    """Returns the shape of each attention."""
    return [
        AttentionShape(
            config.n_heads,
            config.heads[layer].n_kv_heads,
            config.heads[layer].head_dim,
            settings.page_size,
            dtype,
            config.attention_scale,
            choose_kv_dtype(settings.kv_cache_dtype, dtype),
        )
        for layer in config.attention_layers
    ]


def _choose_backend(
    config: DecoderConfig,
    settings: DeviceSettings,
    machine: Machine,
    shape: AttentionShape,
    windows: Sequence[int | None],
) -> Literal["flashinfer", "triton"]:
    """Returns what computes prompts. Raises ``ConfigError``.

    Args:
        config: of the model.
        settings: all of the device.
        machine: with a usable GPU.
        shape: of all layers, where FlashInfer may be chosen.
        windows: of the layers.
    """
    check_attention_backend(settings.attention_backend, machine, config)
    if reason := only_triton(config):
        if settings.attention_backend == "auto":
            logger.info("prompts run on a Triton kernel: %s", reason)
        return "triton"
    return choose_attention_backend(
        settings.attention_backend,
        machine,
        lambda: not_compiled(shape, windows, check_machine(machine).capability),
    )


def _connect(
    collectives: CudaCollectives,
    group: RankGroup,
    settings: DeviceSettings,
    config: DecoderConfig,
    dtype: torch.dtype,
) -> None:
    """Connects the ranks' GPUs. From then on kernels wait for those of other ranks."""
    head_size = Shard(group.rank, group.size).head(config.vocab_size).size
    collectives.allocate(
        max_rows=max(settings.max_num_batched_tokens, settings.max_num_seqs),
        hidden_size=config.hidden_size,
        max_logits=max(settings.max_num_seqs, MAX_PROMPT_LOGPROB_ROWS) * head_size,
        max_broadcast=settings.max_num_seqs + 1,
        dtype=dtype,
    )
    with group.connecting() as store:
        collectives.connect(store, CONNECT_TIMEOUT_S)
    group.watch(collectives.give_up)


def _graph_bytes(runner: ModelRunner, n_layers: int, n_products: int) -> int:
    """Estimates the bytes of all graphs from a capture of the largest of each kind.

    Args:
        runner: captures them.
        n_layers: of the model.
        n_products: products that adapters may change.
    """
    torch.cuda.empty_cache()
    free_before, _ = torch.cuda.mem_get_info()
    n_decode = runner.capture(runner.decode_sizes[-1:]) * len(runner.decode_sizes)
    n_pieces = runner.capture_piecewise(runner.piecewise_sizes[-1:]) * len(runner.piecewise_sizes)
    free_after, _ = torch.cuda.mem_get_info()
    return max(0, free_before - free_after) + driver_bytes(n_decode, n_pieces, n_layers, n_products)
