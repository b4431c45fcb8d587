"""From a checkpoint and settings to an executor that is ready: checks, weights, memory, graphs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from radixkv.checkpoints import Checkpoint
from radixkv.config import LoadFormat
from radixkv.runtime.device import machine_cuda
from radixkv.runtime.device.attention.cuda.base import Attention
from radixkv.runtime.device.attention.cuda.flashinfer import Shape, not_compiled
from radixkv.runtime.device.attention.cuda.paged import PagedAttention
from radixkv.runtime.device.attention.cuda.reference import ReferenceAttention
from radixkv.runtime.device.executor_cuda import CudaExecutor
from radixkv.runtime.device.graphs.decode import buckets
from radixkv.runtime.device.graphs.piecewise import token_buckets
from radixkv.runtime.device.kv_pool_cpu import PageShape
from radixkv.runtime.device.model.decoder_cuda import CudaDecoder
from radixkv.runtime.device.model_runner_cuda import StepRunner
from radixkv.runtime.device.pack_cuda import Packer
from radixkv.runtime.device.persistent_batch_cuda import RowFields
from radixkv.runtime.device.pool_size_cuda import measure, plan_pages
from radixkv.runtime.device.preflight_cuda import check_for_cuda
from radixkv.runtime.device.sampling.cuda.sampler import CudaSampler
from radixkv.runtime.device.staging_cuda import Layout
from radixkv.runtime.device.weights.weights import open_weights

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_GRAPH_LAYER_BYTES = 64 << 10
"""What the driver keeps of each layer's kernels, some 12, in a graph of them all."""
_PIECE_BYTES = 160 << 10
"""And of one of some 10."""


def open_cuda_executor(
    checkpoint: Checkpoint,
    *,
    page_size: int,
    max_rows: int,
    max_tokens: int,
    max_model_len: int,
    kv_cache_memory_bytes: int | None,
    max_total_tokens: int | None,
    gpu_memory_utilization: float,
    dtype: str,
    load_format: LoadFormat,
    enforce_eager: bool,
) -> CudaExecutor:
    """Loads the model onto the current GPU, captures its graphs and makes a pool of what memory is left.

    Args:
        max_rows: slots; a plan's rows have slots below it.
        max_tokens: most tokens of a step.
        kv_cache_memory_bytes: the pool's size; None takes what is left.
        max_total_tokens: the pool in tokens, instead.
        gpu_memory_utilization: the share of the GPU's memory that may be used in all.
        dtype: ``bfloat16``, ``float16``, ``float32``, which is slow, or ``auto``.
        load_format: ``dummy`` takes random weights and reads no file but ``config.json``.
        enforce_eager: whether to do without graphs.

    Raises:
        CheckpointError: the checkpoint cannot be run.
        ConfigError: a setting, the checkpoint or the machine does not fit.
    """
    machine = machine_cuda.look()
    gpu = machine_cuda.check_machine(machine)
    check_for_cuda(
        checkpoint,
        gpu,
        page_size=page_size,
        max_rows=max_rows,
        max_model_len=max_model_len,
        dtype=dtype,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        max_total_tokens=max_total_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    device = torch.device("cuda", torch.cuda.current_device())
    stream = torch.cuda.Stream(device)
    with torch.inference_mode(), torch.cuda.stream(stream):
        numbers = machine_cuda.choose_dtype(dtype, checkpoint.config)
        with open_weights(checkpoint, load_format=load_format, dtype=numbers, device=device) as weights:
            config = weights.config
            shape = Shape(config.n_heads, config.n_kv_heads, config.head_dim, page_size, numbers)
            windows = [window if window and window < max_model_len else None for window in config.windows]
            if numbers is not torch.float32:
                machine_cuda.check_compiled(not_compiled(shape, windows, gpu.capability), machine)
            logger.info("loading %.1f GiB of weights onto %s", weights.n_bytes / _GIB, gpu.name)
            decoder = CudaDecoder(weights, max_model_len, device)
        page = PageShape(config.n_layers, config.n_kv_heads, page_size, config.head_dim, numbers)
        layout = Layout()
        rows = RowFields(max_rows, layout)
        width = -(-max_model_len // page_size)
        attention: Attention[Any, Any]
        if numbers is torch.float32:
            attention = ReferenceAttention(shape, windows, device=device)
        else:
            attention = PagedAttention(shape, windows, max_rows=max_rows, layout=layout, device=device)
        has_graphs = numbers is not torch.float32 and not enforce_eager
        row_sizes = buckets(max_rows) if has_graphs else []
        token_sizes = token_buckets(max_tokens) if has_graphs else []
        n_kept = max(token_sizes, default=0)
        runner = StepRunner(decoder, attention, rows, layout, width=width, n_kept=n_kept, stream=stream)
        sampler = CudaSampler(max_rows, config.vocab_size, device)
        sampler.warm_up(numbers)
        step_bytes = _step_bytes(runner, page, max_tokens, max_model_len)
        graph_bytes = _graph_bytes(runner, config.n_layers, row_sizes, token_sizes)
        runner.open_pool(page, 0)
        torch.cuda.empty_cache()
        n_pages = plan_pages(
            page,
            measure(device, step_bytes + graph_bytes),
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            max_total_tokens=max_total_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=max_model_len,
        )
        logger.info("the KV pool holds %d tokens", n_pages * page_size)
        runner.open_pool(page, n_pages)
        runner.capture(row_sizes)
        runner.capture_pieces(token_sizes)
    packer = Packer(
        page_size=page_size, max_rows=max_rows, max_tokens=max_tokens, max_model_len=max_model_len, n_pages=n_pages
    )
    return CudaExecutor(runner, packer, sampler, vocab_size=config.vocab_size, stream=stream)


def _step_bytes(runner: StepRunner, page: PageShape, max_tokens: int, max_model_len: int) -> int:
    """What the largest step and its sampling will take, by trying it."""
    runner.open_pool(page, 0)
    return runner.measure_largest(max_tokens, max_model_len) + runner.logits_bytes


def _graph_bytes(runner: StepRunner, n_layers: int, row_sizes: Sequence[int], token_sizes: Sequence[int]) -> int:
    """What all graphs will take, by trying the largest of each kind."""
    torch.cuda.empty_cache()
    free_before, _ = torch.cuda.mem_get_info()
    n_graphs = runner.capture(row_sizes[-1:])
    n_pieces = runner.capture_pieces(token_sizes[-1:])
    free_after, _ = torch.cuda.mem_get_info()
    kept = _GRAPH_LAYER_BYTES * n_layers * n_graphs * len(row_sizes) + _PIECE_BYTES * n_pieces * len(token_sizes)
    return max(0, free_before - free_after) + kept
