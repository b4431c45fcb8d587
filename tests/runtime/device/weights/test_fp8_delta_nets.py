"""The inputs of delta nets in FP8, with the projections to single values beside them in 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixkv.checkpoints import resolve
from radixkv.runtime.device.weights.fp8_matrix import Fp8Matrix
from radixkv.runtime.device.weights.layer_weights import RecurrentWeights
from radixkv.runtime.device.weights.open import open_weights
from radixkv.runtime.device.weights.shards import Shard
from support.cases import covering
from support.checkpoints import edited_tensors, save_checkpoint
from support.device_support import HYBRIDS
from support.quantized_checkpoints import FORMATS, quantize_matrices, save_quantized

WHOLE_BLOCKS = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "head_dim": 64,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""Each of two ranks has whole blocks of 128 of all matrices, and of queries, keys and values."""


def recurrent_layers(folder: Path, **settings: Any) -> list[Any]:
    """Returns the layers with states."""
    settings = {"load_format": "auto", "dtype": torch.float32} | settings
    with open_weights(resolve(str(folder), load_format=settings["load_format"]), **settings) as weights:
        layers = [weights.layer(index) for index in range(weights.config.n_layers)]
    return [layer for layer in layers if isinstance(layer.mixer, RecurrentWeights)]


@pytest.mark.parametrize("name", ["nemotron-h", "nemotron-h-moe", "qwen3.5", "qwen3-next"])
def test_values_that_decide_how_long_a_state_lasts_stay_in_16_bits(tmp_path: Path, name: str) -> None:
    """In Mamba2 all inputs do, which are one matrix there. Outputs are rounded as other matrices."""
    save_checkpoint(tmp_path, **HYBRIDS[name])
    rounded, exact = (recurrent_layers(tmp_path, quantization=one, products=["fp8"]) for one in ("fp8", None))
    assert rounded
    for layer, other in zip(rounded, exact, strict=True):
        assert layer.output is not None
        assert isinstance(layer.output.weight, Fp8Matrix)
        inputs, expected = layer.mixer.inputs.weight, other.mixer.inputs.weight
        assert isinstance(expected, torch.Tensor)
        if name.startswith("nemotron"):
            assert torch.equal(inputs, expected)
            continue
        assert isinstance(inputs, Fp8Matrix)
        n_inputs = len(inputs)
        alone = Fp8Matrix.allocate((n_inputs, expected.shape[1]), scales="channels", device=expected.device)
        alone.quantize(expected[:n_inputs])
        assert torch.equal(inputs.dequantize(), alone.dequantize())
        assert torch.equal(layer.mixer.gates.weight, expected[n_inputs:])
        assert len(expected) - n_inputs == 2 * len(layer.mixer.log_decay)


@pytest.mark.parametrize(
    ("published", "n_ranks"),
    covering(
        [
            ("qwen3.5", "fp8 blocks 128"),
            ("qwen3.5", "fp8 tensor"),
            ("qwen3.5-moe", "fp8 channels"),
            ("qwen3-next", "fp8 blocks 128"),
            ("qwen3-next", "fp8 channels"),
        ],
        [1, 2],
    ),
)
def test_inputs_of_delta_nets_stay_in_fp8_as_published(
    tmp_path: Path, published: tuple[str, str], n_ranks: int
) -> None:
    name, form = published
    """With projections to single values in 16 bits. Qwen3-Next's rows are sorted with their scales."""
    save_quantized(tmp_path, form, **(HYBRIDS[name] | WHOLE_BLOCKS))
    for rank in range(n_ranks):
        shard = None if n_ranks == 1 else Shard(rank, n_ranks)
        kept = recurrent_layers(tmp_path / "quantized", products=["fp8"], shard=shard)
        dense = recurrent_layers(tmp_path / "dense", shard=shard)
        dummies = recurrent_layers(tmp_path / "quantized", products=["fp8"], shard=shard, load_format="dummy")
        assert kept
        for layer, other, dummy in zip(kept, dense, dummies, strict=True):
            inputs, gates = layer.mixer.inputs.weight, layer.mixer.gates.weight
            assert isinstance(inputs, Fp8Matrix)
            assert inputs.has_blocks == (form == "fp8 blocks 128")
            assert torch.equal(torch.cat([inputs.dequantize(), gates]), other.mixer.inputs.weight)
            assert (dummy.mixer.inputs.weight.values.shape, dummy.mixer.gates.weight.shape) == (
                inputs.values.shape,
                gates.shape,
            )


@pytest.mark.parametrize("form", ["fp8 channels", "fp8 blocks 128"])
def test_gates_of_delta_nets_that_are_quantized_too(tmp_path: Path, form: str) -> None:
    """With scales of channels all inputs are one matrix. The few rows of a gate are no whole block."""
    save_quantized(tmp_path, form, **(HYBRIDS["qwen3.5"] | WHOLE_BLOCKS))
    file = tmp_path / "quantized" / "model.safetensors"
    stored = load_file(file)
    gates = {name: tensor for name, tensor in stored.items() if "in_proj_a." in name or "in_proj_b." in name}
    parts, dense = quantize_matrices(gates, gates, FORMATS[form][0])
    save_file({name: tensor for name, tensor in stored.items() if name not in gates} | parts, file)
    with edited_tensors(tmp_path / "dense") as tensors:
        tensors |= dense
    layers = (
        recurrent_layers(tmp_path / "quantized", products=["fp8"]),
        recurrent_layers(tmp_path / "quantized"),
        recurrent_layers(tmp_path / "dense"),
    )
    for kept, read, other in zip(*layers, strict=True):
        expected, found = other.mixer.inputs.weight, kept.mixer.inputs.weight.dequantize()
        assert torch.equal(read.mixer.inputs.weight, expected)
        assert (kept.mixer.gates is None) == (form == "fp8 channels")
        if kept.mixer.gates is not None:
            found = torch.cat([found, kept.mixer.gates.weight])
        assert torch.equal(found, expected)
