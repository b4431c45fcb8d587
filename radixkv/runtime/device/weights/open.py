"""Opening a checkpoint's weights, whose headers are checked before anything is read."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Literal

import torch

from radixkv.checkpoints import Checkpoint
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.weights.int4_matrix import Int4Groups
from radixkv.runtime.device.weights.kv_scales import KVScales
from radixkv.runtime.device.weights.matrix_reader import MatrixFormat
from radixkv.runtime.device.weights.parallel_load import N_LANES, ParallelLoader, PinnedLane
from radixkv.runtime.device.weights.quantization.fp8 import fp8_scales
from radixkv.runtime.device.weights.quantization.int4 import Gptq, int4_groups
from radixkv.runtime.device.weights.quantization.matrices import QuantizedMatrices
from radixkv.runtime.device.weights.quantization.parse import check_quantization, parse_scheme
from radixkv.runtime.device.weights.quantization.scheme import WeightScheme
from radixkv.runtime.device.weights.safetensors import Header, RandomTensors, SafetensorsFiles
from radixkv.runtime.device.weights.shapes import expert_stacks, optional_tensors, tensor_shapes
from radixkv.runtime.device.weights.shards import Cut, Cuts, Shard, ShardedTensors
from radixkv.runtime.device.weights.tied_head import check_tied_head
from radixkv.runtime.device.weights.weights import Weights
from radixkv.settings.config import LoadFormat

logger = logging.getLogger(__name__)

WeightProducts = Literal["fp8", "int4"]
"""Weights that a device may multiply without dequantizing them first."""
_Tensors = RandomTensors | SafetensorsFiles
_CPU = torch.device("cpu")


@contextmanager
def open_weights(
    checkpoint: Checkpoint,
    *,
    load_format: LoadFormat,
    dtype: torch.dtype,
    device: torch.device = _CPU,
    quantization: str | None = None,
    products: Collection[WeightProducts] = (),
    shard: Shard | None = None,
    divides_head: bool = False,
) -> Iterator[Weights]:
    """Opens the checkpoint's weights and checks the headers of all tensors.

    Reads no tensor but scales, and a head beside an embedding that ``config.json`` ties it to.

    The files are ``model.safetensors``, or those that ``model.safetensors.index.json`` names. Cost: O(tensors).
    Tensors on a GPU are loaded in parallel and are complete only when the ``with`` block ends. Quantized matrices
    are dequantized, but for those that the device multiplies as they are.

    Args:
        checkpoint: checkpoint to open.
        load_format: ``dummy`` generates random tensors in the shapes that ``config.json`` specifies, whatever
            weight files exist.
        dtype: dtype that the tensors are converted to.
        device: device to put the tensors on.
        quantization: ``fp8`` rounds the layers' matrices to FP8, with a scale for each output channel; the name of
            the checkpoint's own format, or None, changes nothing.
        products: formats that the device multiplies; weights in these formats are not dequantized.
        shard: which part of the model to return; None: all of it.
        divides_head: whether the ranks of a device divide the output head, so that each needs only its part of one
            that is not tied.

    Raises:
        CheckpointError: ``config.json`` is invalid or not supported, or a file or tensor is missing, unexpected,
            corrupt, or of a wrong shape or dtype; or a scale is not finite.
        ConfigError: ``quantization`` does not fit the checkpoint or the device, or the model cannot be divided.
    """
    path = checkpoint.folder / "config.json"
    config = DecoderConfig.parse(checkpoint.config, path)
    if not checkpoint.needs_head:
        config = replace(config, tied_head=True)  # the embedding stands for the head, so that it takes no memory
    scheme = parse_scheme(checkpoint.config, path)
    check_quantization(quantization, checkpoint.config, scheme, has_fp8_products="fp8" in products)
    kept: MatrixFormat | None = None
    if "fp8" in products:
        kept = "channels" if quantization == "fp8" and scheme is None else fp8_scales(scheme)
    if kept is None and "int4" in products:
        kept = int4_groups(scheme)
    head_size = shard.head(config.vocab_size).size if shard is not None and divides_head else None
    # 4-bit matrices of experts and of the output head are dequantized. Of FP8 matrices, only the output head is.
    has_dense = config.experts is not None or (isinstance(scheme, Gptq) and scheme.has_head)
    is_dequantized = scheme is not None and (kept is None or (isinstance(kept, Int4Groups) and has_dense))
    with ExitStack() as stack:
        if load_format == "dummy":
            random = RandomTensors(tensor_shapes(config), dtype, device)
            part, tensors, cuts = _part_of(config, random, shard, scheme, None, divides_head=divides_head)
            weights = Weights(
                part,
                tensors,
                dtype,
                device,
                is_dequantized=is_dequantized,
                kept=kept,
                cuts=cuts,
                head_size=head_size,
            )
            weights.check_cuts(scheme, shard)
            yield weights
            return
        files = SafetensorsFiles(checkpoint.folder, stack)
        files.add_missing_prefix(config.names.layers, config.names.head)
        files.check_layers(config.names.layers, config.n_layers)
        stacks = expert_stacks(config)
        for name in stacks.keys() & files.names:
            files.split(name, stacks[name].shape, stacks[name].parts)
        if checkpoint.needs_head:
            config = check_tied_head(config, files, scheme, dtype)
        shapes = tensor_shapes(config)
        quantized = None if scheme is None else QuantizedMatrices(scheme, shapes, files.names, files)
        headers = {name: Header(shape) for name, shape in shapes.items()}
        kv_scales = KVScales(config, files, files.names)
        headers |= kv_scales.headers
        optional = optional_tensors(config, files.names)
        if quantized is not None:
            headers = quantized.replace(headers)
            optional |= quantized.optional
            is_dequantized |= f"{config.names.head}.weight" in quantized
        files.check(headers, optional)
        if quantized is not None:
            quantized.check_values()
            if is_dequantized:
                parts = "" if kept is None else " of experts and of the output head"
                logger.info(
                    "the checkpoint's %s weights%s are dequantized to %s",
                    quantized.scheme_name,
                    parts,
                    _name(dtype),
                )

        part, views, cuts = _part_of(config, files, shard, scheme, quantized, divides_head=divides_head)
        weights = Weights(
            part,
            views,
            dtype,
            device,
            quantized,
            kv_scales,
            is_dequantized=is_dequantized,
            kept=kept,
            cuts=cuts,
            head_size=head_size,
        )
        weights.check_cuts(scheme, shard)
        if device.type == "cpu":
            yield weights
            return
        lanes = [PinnedLane(device) for _ in range(N_LANES)]
        with ParallelLoader(views, lanes, torch.cuda.Stream(device)) as reads:
            yield replace(weights, source=reads)


def _part_of(
    config: DecoderConfig,
    whole: _Tensors,
    shard: Shard | None,
    scheme: WeightScheme | None,
    quantized: QuantizedMatrices | None,
    *,
    divides_head: bool,
) -> tuple[DecoderConfig, _Tensors | ShardedTensors, Mapping[str, Cut]]:
    """Returns a rank's model, its tensors, and the cuts of matrices that are dequantized whole."""
    if shard is None:
        return config, whole, {}
    cuts = Cuts.of(config, shard, scheme, quantized, divides_head=divides_head)
    tensors = ShardedTensors(whole, cuts, is_first=shard.rank == 0)
    return config.shard(shard.n_ranks), tensors, cuts.dequantized


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
