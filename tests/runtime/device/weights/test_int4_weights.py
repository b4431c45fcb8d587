"""Weights that a device multiplies in 4 bits."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from radixkv.checkpoints import resolve
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.weights.int4_matrix import ZERO_BITS, Int4Groups, Int4Matrix, int4_bytes
from radixkv.runtime.device.weights.layer_weights import ExpertsWeights, LinearWeights
from radixkv.runtime.device.weights.open import open_weights
from radixkv.runtime.device.weights.parallel_load import ParallelLoader
from radixkv.runtime.device.weights.quantization.int4 import int4_groups
from radixkv.runtime.device.weights.quantization.matrices import QuantizedMatrices
from radixkv.runtime.device.weights.quantization.parse import parse_scheme
from radixkv.runtime.device.weights.safetensors import SafetensorsFiles
from radixkv.runtime.device.weights.shapes import tensor_shapes
from radixkv.runtime.device.weights.weights import Weights
from radixkv.settings.config import LoadFormat
from support.cases import covering
from support.checkpoints import edited_config, save_checkpoint
from support.device_support import PlainLane
from support.quantized_checkpoints import FORMATS, INT4_FORMATS, layer_linears, linears, save_quantized

CPU = torch.device("cpu")
ODD = {"hidden_size": 160, "intermediate_size": 416, "num_attention_heads": 4, "head_dim": 40}
"""Sizes that are whole groups of 32 and no whole units of 128 inputs."""


def int4_of(linear: LinearWeights) -> Int4Matrix:
    assert isinstance(linear.weight, Int4Matrix)
    return linear.weight


def check_same(found: list[LinearWeights], expected: list[LinearWeights]) -> None:
    for linear, dense in zip(found, expected, strict=True):
        assert torch.equal(int4_of(linear).dequantize(), dense.weight)


@pytest.mark.parametrize(("name", "sizes"), covering(INT4_FORMATS, [{}, ODD]))
def test_matrices_of_a_checkpoint_stay_in_4_bits(tmp_path: Path, name: str, sizes: dict[str, Any]) -> None:
    save_quantized(tmp_path, name, **sizes)
    check_same(linears(tmp_path / "quantized", products=["fp8", "int4"]), linears(tmp_path / "dense"))


@pytest.mark.parametrize("name", ["awq", "gptq by activation", "int4"])
def test_other_matrices_are_dequantized(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Groups of 16 inputs, and inputs in another order."""
    save_quantized(tmp_path, name)
    with caplog.at_level(logging.INFO):
        found = linears(tmp_path / "quantized", products=["int4"])
    assert "weights are dequantized to float32" in caplog.text
    for linear, dense in zip(found, linears(tmp_path / "dense"), strict=True):
        assert isinstance(linear.weight, Tensor)
        assert torch.equal(linear.weight, dense.weight)


@pytest.mark.parametrize("products", [(), ("fp8",)])
def test_a_device_without_such_products_has_dense_matrices(tmp_path: Path, products: tuple[str, ...]) -> None:
    save_quantized(tmp_path, "awq 32")
    for linear in linears(tmp_path / "quantized", products=products):
        assert isinstance(linear.weight, Tensor)


def test_experts_are_dequantized(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    save_quantized(tmp_path, "awq 32", model_type="qwen3_moe", **experts)
    checkpoint = resolve(str(tmp_path / "quantized"))
    with open_weights(checkpoint, load_format="auto", dtype=torch.float32, products=["int4"]) as weights:
        layer = weights.layer(0)
        assert isinstance(layer.output.weight, Int4Matrix)
        assert isinstance(layer.mlp, ExpertsWeights)
        assert isinstance(layer.mlp.gate_up.weight, Tensor)
        assert weights.dequantizing_bytes > 0


@pytest.mark.parametrize("has_head", [False, True])
def test_memory_for_dequantizing_counts_the_output_head(tmp_path: Path, has_head: bool) -> None:
    save_quantized(tmp_path, "gptq 32")
    with edited_config(tmp_path / "quantized") as config:
        config["vocab_size"] = 100_000
        config["quantization_config"]["lm_head"] = has_head
    checkpoint = resolve(str(tmp_path / "quantized"), load_format="dummy")
    with open_weights(checkpoint, load_format="dummy", dtype=torch.bfloat16, products=["int4"]) as weights:
        n_values = 100_000 * weights.config.hidden_size
        assert (weights.dequantizing_bytes >= 16 * n_values) == has_head


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_sizes_are_those_of_the_packed_matrices(tmp_path: Path, load_format: LoadFormat) -> None:
    save_quantized(tmp_path, "awq 32", **ODD)
    checkpoint = resolve(str(tmp_path / "quantized"), load_format=load_format)
    with open_weights(checkpoint, load_format=load_format, dtype=torch.bfloat16, products=["int4"]) as weights:
        found = layer_linears(weights)
        others = sum(
            torch.Size(shape).numel() * 2
            for name, shape in tensor_shapes(weights.config).items()
            if not name.endswith("_proj.weight")
        )
        assert weights.n_bytes == sum(int4_of(linear).nbytes for linear in found) + others
    if load_format == "dummy":
        for linear in found:
            matrix = int4_of(linear)
            x = torch.randn(200, matrix.n_in)
            assert 0.8 < float((x @ matrix.dequantize().t()).std()) < 1.25


def test_weights_are_packed_by_the_threads_that_load_them(tmp_path: Path) -> None:
    save_quantized(tmp_path, "gptq 32")
    folder = tmp_path / "quantized"
    checkpoint = resolve(str(folder))
    with ExitStack() as stack:
        config = DecoderConfig.parse(checkpoint.config, folder / "config.json")
        scheme = parse_scheme(checkpoint.config, folder / "config.json")
        assert scheme is not None
        files = SafetensorsFiles(folder, stack)
        quantized = QuantizedMatrices(scheme, tensor_shapes(config), files.names, files)
        reads = stack.enter_context(ParallelLoader(files, [PlainLane() for _ in range(4)]))
        found = layer_linears(Weights(config, reads, torch.float32, CPU, quantized, kept=int4_groups(scheme)))
    check_same(found, linears(tmp_path / "dense"))


@pytest.mark.parametrize(
    ("shape", "size"), covering([(48, 256), (3, 200), (1, 8), (5_000, 1000)], [32, 96, 128, None])
)
def test_random_matrices_are_rounded(shape: tuple[int, int], size: int | None) -> None:
    torch.manual_seed(0)
    dense = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]
    groups = Int4Groups(size)
    matrix = Int4Matrix.allocate(shape, groups, CPU)
    matrix.quantize(dense)
    assert matrix.nbytes == int4_bytes(shape, groups)
    steps = (matrix.scales & ~ZERO_BITS).view(torch.float32).t()
    of_inputs = torch.arange(shape[1]) // matrix.group_size
    assert ((matrix.dequantize() - dense).abs() <= steps[:, of_inputs] * 1.001).all()


def test_scales_of_16_bits_are_exact_and_others_rounded() -> None:
    bits = torch.arange(1, 0x7C00, dtype=torch.int16)
    for scales in (bits.view(torch.float16), torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)):
        stored = store_scales(scales.float())
        assert torch.equal(stored[scales.float() > 1e-38], scales.float()[scales.float() > 1e-38])
    any_scales = torch.rand(10_000) + 0.01
    assert ((store_scales(any_scales) - any_scales).abs() <= any_scales * 2.0**-19).all()


def store_scales(scales: Tensor) -> Tensor:
    """Returns scales as a matrix has them; all zero points are 16, the largest."""
    matrix = Int4Matrix.allocate((len(scales), 8), Int4Groups(None), CPU)
    matrix.store(torch.zeros(len(scales), 8, dtype=torch.uint8), scales[:, None], torch.full((len(scales), 1), 16))
    assert (matrix.scales & ZERO_BITS == 16).all()
    return (matrix.scales[0] & ~ZERO_BITS).view(torch.float32)


def test_dummy_weights_of_a_config(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, hidden_size=256, intermediate_size=384)
    with edited_config(tmp_path) as config:
        config["quantization_config"] = FORMATS["awq 32"][1] | {"group_size": 128}
    found = linears(tmp_path, load_format="dummy", products=["int4"])
    assert {int4_of(linear).group_size for linear in found} == {128}
