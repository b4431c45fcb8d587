"""Weights that a device multiplies in FP8: those of a checkpoint, and those rounded while they are loaded."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from radixkv import LLM
from radixkv.checkpoints import resolve
from radixkv.errors import CheckpointError, ConfigError
from radixkv.runtime.device.kv_dtype import FP8
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.weights.fp8_matrix import BLOCK, Fp8Matrix, Fp8Scales, fp8_bytes
from radixkv.runtime.device.weights.layer_weights import ExpertsWeights, LinearWeights
from radixkv.runtime.device.weights.open import open_weights
from radixkv.runtime.device.weights.parallel_load import ParallelLoader
from radixkv.runtime.device.weights.safetensors import SafetensorsFiles
from radixkv.runtime.device.weights.weights import Weights
from radixkv.settings.config import LoadFormat
from support.cases import covering
from support.checkpoints import edited_config, edited_tensors, save_checkpoint
from support.device_support import PlainLane
from support.quantized_checkpoints import layer_linears, linears, save_quantized

WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64}


def fp8_of(linear: LinearWeights) -> Fp8Matrix:
    assert isinstance(linear.weight, Fp8Matrix)
    return linear.weight


@pytest.mark.parametrize("name", ["fp8 channels", "fp8 tensor"])
def test_matrices_of_a_checkpoint_stay_in_fp8(tmp_path: Path, name: str) -> None:
    save_quantized(tmp_path, name)
    found = linears(tmp_path / "quantized", products=["fp8"])
    expected = linears(tmp_path / "dense")
    for linear, dense in zip(found, expected, strict=True):
        matrix = fp8_of(linear)
        assert matrix.values.dtype == FP8
        assert torch.equal(matrix.dequantize(), dense.weight)


def save_blocks(folder: Path, n_kv_heads: int = 2) -> dict[str, Tensor]:
    """Saves a checkpoint with blocks of 128 × 128. Returns its dense matrices by name."""
    save_checkpoint(folder, **WIDE | {"num_key_value_heads": n_kv_heads})
    dense: dict[str, Tensor] = {}
    with edited_tensors(folder) as tensors:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            matrix = Fp8Matrix.allocate(tuple(tensors[name].shape), scales="blocks", device=torch.device("cpu"))
            matrix.quantize(tensors[name])
            tensors |= {name: matrix.values, f"{name}_scale_inv": matrix.scales}
            dense[name] = matrix.dequantize()
    with edited_config(folder) as config:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    return dense


def test_blocks_stay_in_fp8(tmp_path: Path) -> None:
    dense = save_blocks(tmp_path)
    query_key_value = linears(tmp_path, products=["fp8"])[0]
    parts = [dense[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    matrix = fp8_of(query_key_value)
    assert matrix.scales.shape == (4, 2)
    assert torch.equal(matrix.dequantize(), torch.cat(parts))


def test_a_stack_in_which_a_matrix_begins_within_a_block_is_dequantized(tmp_path: Path) -> None:
    """The matrices of values begin after 64 rows of keys."""
    dense = save_blocks(tmp_path, n_kv_heads=1)
    for index, linear in enumerate(linears(tmp_path, products=["fp8"])):
        if index % 4:
            fp8_of(linear)
            continue
        parts = [dense[f"model.layers.{index // 4}.self_attn.{part}_proj.weight"] for part in "qkv"]
        assert isinstance(linear.weight, Tensor)
        assert torch.equal(linear.weight, torch.cat(parts))


def test_blocks_of_another_size_are_dequantized(tmp_path: Path) -> None:
    save_quantized(tmp_path, "fp8 blocks")  # of 32 × GROUP, which no product takes
    found = linears(tmp_path / "quantized", products=["fp8"])
    for linear, dense in zip(found, linears(tmp_path / "dense"), strict=True):
        assert isinstance(linear.weight, Tensor)
        assert torch.equal(linear.weight, dense.weight)


@pytest.mark.parametrize(("dtype", "load_format"), covering([torch.float32, torch.bfloat16], ["auto", "dummy"]))
def test_weights_are_rounded_while_they_are_loaded(
    tmp_path: Path, dtype: torch.dtype, load_format: LoadFormat
) -> None:
    save_checkpoint(tmp_path, **WIDE)
    found = linears(tmp_path, load_format=load_format, dtype=dtype, quantization="fp8", products=["fp8"])
    if load_format == "dummy":
        assert all(fp8_of(linear).values.float().std() > 100 for linear in found)
        return
    for linear, dense in zip(found, linears(tmp_path, dtype=dtype), strict=True):
        assert isinstance(dense.weight, Tensor)
        difference = (fp8_of(linear).dequantize() - dense.weight.float()).abs()
        largest = dense.weight.float().abs().amax(1, keepdim=True)
        # e4m3 has three bits of fraction, and steps of 2^-9 near 0 where the largest value is 448.
        assert (difference <= dense.weight.float().abs() / 16 * 1.001 + largest / 448 * 2**-10).all()


@pytest.mark.parametrize(
    ("shape", "scales"), covering([(300, 200), (1, 1), (128, 256), (70_000, 256)], ["channels", "blocks"])
)
def test_quantization_by_parts(shape: tuple[int, int], scales: Fp8Scales) -> None:
    torch.manual_seed(0)
    dense = torch.randn(shape) * torch.logspace(-30, 3, shape[0])[:, None]
    dense[-1] = 0.0
    matrix = Fp8Matrix.allocate(shape, scales=scales, device=torch.device("cpu"))
    matrix.quantize(dense)
    assert matrix.nbytes == fp8_bytes(shape, scales)
    if scales == "channels":
        exact = dense[:-1].double()
        error = (matrix.dequantize()[:-1] - exact).norm(dim=1) / exact.norm(dim=1)
        assert (error < 0.06).all()
        assert (matrix.values[:-1].float().abs().amax(1) == 448).all()
    assert (matrix.dequantize()[-1] == 0).all()


def test_quantized_weights_are_rounded_by_the_threads_that_load_them(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **WIDE)
    expected = linears(tmp_path, quantization="fp8", products=["fp8"])
    checkpoint = resolve(str(tmp_path))
    with ExitStack() as stack:
        config = DecoderConfig.parse(checkpoint.config, tmp_path / "config.json")
        lanes = [PlainLane() for _ in range(4)]
        reads = stack.enter_context(ParallelLoader(SafetensorsFiles(tmp_path, stack), lanes))
        weights = Weights(config, reads, torch.float32, torch.device("cpu"), kept="channels")
        found = layer_linears(weights)
    for linear, other in zip(found, expected, strict=True):
        assert torch.equal(fp8_of(linear).dequantize(), fp8_of(other).dequantize())


@pytest.mark.parametrize(
    ("name", "quantization", "message"),
    [
        ("awq", "fp8", "quantization is 'fp8', but the checkpoint's weights are in the format awq; leave it out"),
        ("fp8 channels", "gptq", "quantization is 'gptq', but .* in the format fp8"),
        (None, "awq", "quantization is 'awq', but .* not quantized; this release quantizes such weights to 'fp8'"),
    ],
)
def test_formats_that_do_not_fit_are_refused(
    tmp_path: Path, name: str | None, quantization: str, message: str
) -> None:
    if name is None:
        save_checkpoint(tmp_path / "quantized")
    else:
        save_quantized(tmp_path, name)
    with pytest.raises(ConfigError, match=message):
        linears(tmp_path / "quantized", quantization=quantization, products=["fp8"])


def test_the_name_of_the_checkpoints_format_changes_nothing(tmp_path: Path) -> None:
    save_quantized(tmp_path, "fp8 channels")
    named = linears(tmp_path / "quantized", quantization="fp8")
    for linear, dense in zip(named, linears(tmp_path / "dense"), strict=True):
        assert torch.equal(linear.weight, dense.weight)


def test_the_cpu_does_not_quantize() -> None:
    with pytest.raises(ConfigError, match="quantization 'fp8' needs a GPU"):
        LLM(device="cpu", quantization="fp8")


def test_the_method_that_config_json_names_changes_nothing(tmp_path: Path) -> None:
    save_quantized(tmp_path, "fp8 channels")
    assert linears(tmp_path / "quantized", quantization="compressed-tensors", products=["fp8"])


EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize("expert", [0, 2])
def test_a_layer_with_an_expert_that_is_not_quantized_has_16_bits(tmp_path: Path, expert: int) -> None:
    save_quantized(tmp_path, "fp8 channels", model_type="qwen3_moe", **EXPERTS)
    with edited_tensors(tmp_path / "quantized") as tensors:
        name = f"model.layers.0.mlp.experts.{expert}.up_proj.weight"
        tensors[name] = load_file(tmp_path / "dense" / "model.safetensors")[name]
        del tensors[f"{name}_scale"]
    stacks = []
    for kind, has_products in (("quantized", True), ("dense", False)):
        checkpoint = resolve(str(tmp_path / kind))
        with open_weights(
            checkpoint, load_format="auto", dtype=torch.float32, products=["fp8"] if has_products else []
        ) as weights:
            layers = [weights.layer(index).mlp for index in range(2)]
        assert all(isinstance(mlp, ExpertsWeights) for mlp in layers)
        stacks.append([mlp.gate_up.weight for mlp in layers if isinstance(mlp, ExpertsWeights)])
    (mixed, quantized), (dense, other) = stacks
    assert isinstance(mixed, Tensor)
    assert torch.equal(mixed, dense)
    assert isinstance(quantized, Fp8Matrix)
    assert torch.equal(quantized.dequantize(), other)


def test_calibrated_scales_of_k_and_v_are_allowed_beside_quantized_weights(tmp_path: Path) -> None:
    save_quantized(tmp_path, "fp8 channels")
    folder = tmp_path / "quantized"
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    with edited_config(folder) as config:
        config["quantization_config"]["kv_cache_scheme"] = scheme
    assert linears(folder, products=["fp8"])
    for change in ({"strategy": "attn_head"}, {"dynamic": True}, {"num_bits": 4}):
        with edited_config(folder) as config:
            config["quantization_config"]["kv_cache_scheme"] = scheme | change
        with pytest.raises(CheckpointError, match="kv_cache_scheme .* is not supported"):
            linears(folder)
