"""Checkpoints in the formats of quantized weights, with the dense checkpoint that each stands for.

The packing follows the programs that write these formats, one element after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from radixkv.checkpoints import resolve
from radixkv.runtime.device.weights.layer_weights import LinearWeights, MlpWeights
from radixkv.runtime.device.weights.open import open_weights
from radixkv.runtime.device.weights.weights import Weights
from radixkv.settings.config import LoadFormat
from support.checkpoints import save_checkpoint

GROUP = 16
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of each nibble, as in AutoAWQ."""
Stored = dict[str, Tensor]
Quantize = Callable[[Tensor], tuple[Stored, Tensor]]
"""Maps a matrix to its stored tensors by suffix, and to the matrix that they stand for."""


def pack_words(columns: Tensor) -> Tensor:
    """Packs [rows, 8 n] integers of 0 to 15 into [rows, n] int32, the first in the lowest bits."""
    words = torch.zeros(columns.shape[0], columns.shape[1] // 8, dtype=torch.int64)
    for column in range(columns.shape[1]):
        words[:, column // 8] |= columns[:, column].long() << 4 * (column % 8)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _groups(weight: Tensor, group: int, *, is_symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns integers [out, in], scales and zero points [out, groups]."""
    parts = weight.float().unflatten(1, (-1, group))
    if is_symmetric:
        scales = (parts.abs().amax(-1) / 7).half().float()
        zeros = torch.full_like(scales, 8)
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scales = ((high - low) / 15).half().float()
        zeros = (-low / scales).round().clamp(1, 15)
    values = (parts / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    return values.flatten(1), scales, zeros


def _dense(values: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor | None = None) -> Tensor:
    if groups is None:
        groups = torch.arange(values.shape[1]) // (values.shape[1] // scales.shape[1])
    return (values - zeros[:, groups]) * scales[:, groups]


def awq(weight: Tensor, group: int = GROUP) -> tuple[Stored, Tensor]:
    values, scales, zeros = _groups(weight, group, is_symmetric=False)

    def pack(columns: Tensor) -> Tensor:
        order = [8 * (i // 8) + AWQ_ORDER[i % 8] for i in range(columns.shape[1])]
        return pack_words(columns[:, order])

    stored = {"qweight": pack(values.t()), "qzeros": pack(zeros.t()), "scales": scales.t().contiguous().half()}
    return stored, _dense(values, scales, zeros)


def gptq(
    weight: Tensor, group: int | None = GROUP, *, zero_offset: int = 1, is_shuffled: bool = False
) -> tuple[Stored, Tensor]:
    """Quantizes in groups; None makes each row one."""
    n_in = weight.shape[1]
    group = group or n_in
    order = (
        torch.randperm(n_in, generator=torch.Generator().manual_seed(n_in)) if is_shuffled else torch.arange(n_in)
    )
    values, scales, zeros = _groups(weight[:, order], group, is_symmetric=False)
    groups = torch.empty(n_in, dtype=torch.int32)
    groups[order] = torch.arange(n_in, dtype=torch.int32) // group
    values = values[:, order.argsort()]
    stored = {
        "qweight": pack_words(values).t().contiguous(),
        "qzeros": pack_words(zeros.t() - zero_offset),
        "scales": scales.t().contiguous().half(),
        "g_idx": groups,
        "bias": torch.zeros(len(weight)),  # which AutoGPTQ writes beside matrices that have none
    }
    return stored, _dense(values, scales, zeros, groups.long())


def packed_int4(weight: Tensor, group: int | None = GROUP) -> tuple[Stored, Tensor]:
    """Quantizes in groups; None makes each row one."""
    values, scales, zeros = _groups(weight, group or weight.shape[1], is_symmetric=True)
    shape = torch.tensor(weight.shape)
    stored = {"weight_packed": pack_words(values), "weight_scale": scales.bfloat16(), "weight_shape": shape}
    return stored, _dense(values, scales.bfloat16().float(), zeros)


def fp8_channels(weight: Tensor) -> tuple[Stored, Tensor]:
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    return _fp8(weight, scale, scale, "weight_scale")


def fp8_tensor(weight: Tensor) -> tuple[Stored, Tensor]:
    scale = weight.float().abs().max() / 448
    stored, dense = _fp8(weight, scale, scale, "weight_scale")
    return stored | {"input_scale": torch.tensor(1.0)}, dense


def fp8_blocks(
    weight: Tensor, block: tuple[int, int] = (32, GROUP), *, suffix: str = "weight_scale_inv"
) -> tuple[Stored, Tensor]:
    n_out, n_in = block
    scales, full = torch.empty(-(-len(weight) // n_out), -(-weight.shape[1] // n_in)), torch.empty(weight.shape)
    for row in range(len(scales)):
        for column in range(scales.shape[1]):
            part = slice(n_out * row, n_out * (row + 1)), slice(n_in * column, n_in * (column + 1))
            scales[row, column] = weight[part].float().abs().max() / 448
            full[part] = scales[row, column]
    return _fp8(weight, scales, full, suffix)


def _fp8(weight: Tensor, scale: Tensor, full: Tensor, suffix: str) -> tuple[Stored, Tensor]:
    values = (weight.float() / full).to(torch.float8_e4m3fn)
    return {"weight": values, suffix: scale}, values.float() * full


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of MXFP4's 4-bit floats."""


def mxfp4(stack: Tensor) -> tuple[Stored, Tensor]:
    """Quantizes experts' matrices, [experts, in, out]. The suffixes begin with an underscore."""
    blocks = stack.transpose(1, 2).float().unflatten(-1, (-1, 32))
    exponents = (blocks.abs().amax(-1) / 6).log2().ceil()
    scales = torch.exp2(exponents)
    nearest = (blocks / scales[..., None])[..., None].sub(torch.tensor(E2M1)).abs().argmin(-1)
    dense = torch.tensor(E2M1)[nearest] * scales[..., None]
    stored = {
        "_blocks": (nearest[..., ::2] | nearest[..., 1::2] << 4).to(torch.uint8),
        "_scales": (exponents + 127).to(torch.uint8),
    }
    return stored, dense.flatten(-2).transpose(1, 2)


def _compressed(strategy: str, *, bits: int, kind: str, **weights: Any) -> dict[str, Any]:
    settings = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": settings | weights, "input_activations": None}
    written = "float-quantized" if kind == "float" else "pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": written,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FORMATS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "fp8 channels": (fp8_channels, _compressed("channel", bits=8, kind="float")),
    "fp8 tensor": (fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [32, GROUP]}),
    "fp8 compressed blocks": (
        lambda weight: fp8_blocks(weight, suffix="weight_scale"),
        _compressed("block", bits=8, kind="float", block_structure=[32, GROUP]),
    ),
    "fp8 blocks 128": (
        lambda weight: fp8_blocks(weight, (128, 128)),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "gptq by activation": (
        lambda weight: gptq(weight, zero_offset=0, is_shuffled=True),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "checkpoint_format": "gptq_v2"},
    ),
    "mxfp4": (mxfp4, {"quant_method": "mxfp4"}),
    "fp8 compressed tensor": (fp8_tensor, _compressed("tensor", bits=8, kind="float")),
    "fp8 modelopt": (
        fp8_tensor,
        {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "ignore": ["lm_head"],
        },
    ),
    "int4": (packed_int4, _compressed("group", bits=4, kind="int", group_size=GROUP)),
    "awq 32": (
        lambda weight: awq(weight, 32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    ),
    "gptq 32": (lambda weight: gptq(weight, 32), {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "gptq rows": (
        lambda weight: gptq(weight, None, zero_offset=0),
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"},
    ),
    "int4 32": (lambda weight: packed_int4(weight, 32), _compressed("group", bits=4, kind="int", group_size=32)),
    "int4 rows": (lambda weight: packed_int4(weight, None), _compressed("channel", bits=4, kind="int")),
}
INT4_FORMATS = ("awq 32", "gptq 32", "gptq rows", "int4 32", "int4 rows")
"""Formats whose matrices stay in 4 bits on a device that multiplies them."""


def _is_quantized(tensor_name: str, tensor: Tensor, name: str) -> bool:
    if name == "mxfp4":
        return tensor.ndim == 3
    is_small = any(part in tensor_name for part in (".mlp.gate.", "shared_expert_gate.", "in_proj_a.", "in_proj_b"))
    return tensor.ndim == 2 and ".layers." in tensor_name and not is_small


def save_quantized(folder: Path, name: str, **changes: Any) -> None:
    """Saves a small checkpoint in a format as ``folder/quantized``, and dense as ``folder/dense``.

    Args:
        folder: where to save.
        name: of ``FORMATS``.
        changes: go into ``config.json``.
    """
    quantize, settings = FORMATS[name]
    dense = folder / "dense"
    save_checkpoint(dense, **({"hidden_size": 64, "intermediate_size": 96} | changes))
    tensors = load_file(dense / "model.safetensors")
    matrices = {key for key, tensor in tensors.items() if _is_quantized(key, tensor, name)}
    stored, tensors = quantize_matrices(tensors, matrices, quantize)
    save_file({key: value.contiguous() for key, value in tensors.items()}, dense / "model.safetensors")
    save_stored(folder / "quantized", stored, json.loads((dense / "config.json").read_text()), settings)


def quantize_matrices(tensors: Stored, matrices: Container[str], quantize: Quantize) -> tuple[Stored, Stored]:
    """Returns tensors with ``matrices`` as they are stored quantized, and as what these stand for."""
    stored, dense = {}, dict(tensors)
    for name, tensor in tensors.items():
        if name not in matrices:
            stored[name] = tensor
            continue
        parts, dense[name] = quantize(tensor)
        stored |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in parts.items()}
    return stored, dense


def save_stored(folder: Path, stored: Stored, config: dict[str, Any], settings: dict[str, Any]) -> None:
    """Saves quantized tensors with the ``config.json`` that says so."""
    folder.mkdir()
    save_file({key: value.contiguous() for key, value in stored.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def linears(
    folder: Path, *, load_format: LoadFormat = "auto", dtype: torch.dtype = torch.float32, **settings: Any
) -> list[LinearWeights]:
    """Returns the stacked matrices of all layers."""
    checkpoint = resolve(str(folder), load_format=load_format)
    with open_weights(checkpoint, load_format=load_format, dtype=dtype, **settings) as weights:
        return layer_linears(weights)


def layer_linears(weights: Weights) -> list[LinearWeights]:
    found = []
    for index in range(weights.config.n_layers):
        layer = weights.layer(index)
        assert isinstance(layer.mlp, MlpWeights)
        found += [layer.mixer.query_key_value, layer.output, layer.mlp.gate_up, layer.mlp.down]
    return found
