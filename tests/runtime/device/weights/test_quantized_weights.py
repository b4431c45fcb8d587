"""Quantized checkpoints are read as the dense matrices that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from radixkv.checkpoints import resolve
from radixkv.errors import CheckpointError
from radixkv.runtime.device.weights.fp8_matrix import Fp8Matrix
from radixkv.runtime.device.weights.layer_weights import RecurrentWeights
from radixkv.runtime.device.weights.open import open_weights
from radixkv.runtime.device.weights.quantization.fp8 import Fp8Blocks, Fp8Channels
from radixkv.runtime.device.weights.quantization.int4 import Awq, Gptq, PackedInt4, unpack
from radixkv.runtime.device.weights.quantization.mxfp4 import Mxfp4
from radixkv.runtime.device.weights.quantization.parse import parse_scheme
from support.cases import rest_nightly
from support.checkpoints import edited_config, edited_tensors
from support.device_support import CHECKPOINTS, HYBRIDS, load_oracle, logits_of, random_ids
from support.quantized_checkpoints import FORMATS, save_quantized


def load(folder: Path) -> None:
    with open_weights(resolve(str(folder)), load_format="auto", dtype=torch.float32) as weights:
        for index in range(weights.config.n_layers):
            weights.layer(index)


@pytest.mark.parametrize("name", rest_nightly(FORMATS, kept=(0, 2, 5, 7, 8, 10, 11, 14)))
def test_logits_are_those_of_the_dense_checkpoint(tmp_path: Path, name: str) -> None:
    save_quantized(tmp_path, name, **(CHECKPOINTS["gpt-oss"] if name == "mxfp4" else {}))
    ids = random_ids(50, seed=1)
    logits, expected = (logits_of(tmp_path / kind, ids) for kind in ("quantized", "dense"))
    assert torch.equal(logits, expected)
    with torch.inference_mode():
        oracle = load_oracle(resolve(str(tmp_path / "dense")))(torch.tensor([ids])).logits[0]
    assert (logits - oracle).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["fp8 blocks", "awq"])
def test_experts_are_quantized_too(tmp_path: Path, name: str) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    save_quantized(tmp_path, name, model_type="qwen3_moe", **experts)
    ids = random_ids(20, seed=1)
    assert torch.equal(*(logits_of(tmp_path / kind, ids) for kind in ("quantized", "dense")))


@pytest.mark.parametrize("name", ["qwen3.5-vision", "qwen3.5-moe", "qwen3-next"])
def test_models_with_delta_nets_in_blocks_of_fp8(tmp_path: Path, name: str) -> None:
    """As published: a configuration of the whole, and projections to single values in 16 bits."""
    sizes = {"moe_intermediate_size": 32} if name != "qwen3.5-vision" else {}
    save_quantized(tmp_path, "fp8 blocks", **(HYBRIDS[name] | sizes | {"intermediate_size": 96}))
    ids = random_ids(20, seed=1)
    assert torch.equal(*(logits_of(tmp_path / kind, ids) for kind in ("quantized", "dense")))


@pytest.mark.parametrize(
    ("name", "form", "head_dim", "is_kept"),
    [
        ("qwen3.5-moe", "fp8 channels", 16, True),
        ("qwen3-next", "fp8 tensor", 16, True),
        ("qwen3.5", "fp8 blocks 128", 128, True),
        ("qwen3.5", "fp8 blocks 128", 64, False),
        ("qwen3.5", "awq 32", 16, False),
    ],
)
def test_queries_with_their_gates_stay_in_fp8_where_heads_are_whole_blocks(
    tmp_path: Path, name: str, form: str, head_dim: int, is_kept: bool
) -> None:
    """Their rows are sorted, with their scales. Where they do not stay in FP8, they count in 16 bits."""
    sizes = {"linear_value_head_dim": 16, "head_dim": head_dim, "num_attention_heads": 4, "intermediate_size": 96}
    save_quantized(tmp_path, form, **(HYBRIDS[name] | sizes))
    checkpoint = resolve(str(tmp_path / "quantized"))
    layers = {}
    for products in ((), ("fp8", "int4")):
        with open_weights(checkpoint, load_format="auto", dtype=torch.float32, products=products) as weights:
            layers[products] = [weights.layer(index) for index in range(weights.config.n_layers)]
            n_values, n_quantized = weights.n_values, weights.n_quantized_values
    assert 0 < n_quantized < n_values
    for dense, kept in zip(*layers.values(), strict=True):
        assert not isinstance(kept.output.weight, torch.Tensor)
        if isinstance(dense.mixer, RecurrentWeights):
            found = kept.mixer.inputs.weight
            if isinstance(found, Fp8Matrix):
                assert form.startswith("fp8")
                found = torch.cat([found.dequantize(), kept.mixer.gates.weight])
            assert torch.equal(found, dense.mixer.inputs.weight)
            continue
        for part in ("query_key_value", "output_gate"):
            found = getattr(kept.mixer, part).weight
            assert isinstance(found, Fp8Matrix) == is_kept
            found = found.dequantize() if is_kept else found
            assert torch.equal(found, getattr(dense.mixer, part).weight)


def edit(folder: Path, **changes: Any) -> None:
    """Changes settings of ``quantization_config``."""
    with edited_config(folder) as config:
        config["quantization_config"] |= changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported; .*'fp8', 'awq'"),
        ({"quant_method": None}, "quant_method '' is not supported"),
        ({"bits": 3}, "bits 3 is not supported"),
        ({"version": "gemv"}, "version 'gemv'"),
        ({"group_size": 20}, "group_size 20 .* multiple of 8"),
        ({"group_size": -1}, "group_size is -1"),
        ({"group_size": 24}, "q_proj cannot be in the format awq: 64 inputs are not whole groups of 24"),
        ({"group_size": 32}, r"has shape \[4, 8\]; config.json calls for \[2, 8\]"),
        ({"quant_method": "fp8"}, "no matrix has a weight_scale; fetch"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"block of the scales is \[128\]"),
        ({"quant_method": "gptq"}, r"q_proj.qweight .* has shape \[64, 8\]; config.json calls for \[8, 64\]"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "compressed-tensors"}, "config_groups is None"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"]}}},
            "config_groups must",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 8}}},
            },
            "type int8 with the strategy None",
        ),
    ],
)
def test_formats_that_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_quantized(tmp_path, "awq")
    edit(tmp_path / "quantized", **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "quantized")


def test_modelopt_is_read_from_its_own_file(tmp_path: Path) -> None:
    save_quantized(tmp_path, "fp8 modelopt")
    with edited_config(tmp_path / "quantized") as config:
        settings = config.pop("quantization_config")
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": settings["quant_algo"]}}
    (tmp_path / "quantized" / "hf_quant_config.json").write_text(json.dumps(own))
    matrices = []
    for kind in ("quantized", "dense"):
        with open_weights(resolve(str(tmp_path / kind)), load_format="auto", dtype=torch.float32) as weights:
            matrices.append(weights.layer(0).output.weight)
    assert torch.equal(*matrices)
    own["quantization"]["quant_algo"] = "NVFP4"
    (tmp_path / "quantized" / "hf_quant_config.json").write_text(json.dumps(own))
    for load_format in ("auto", "dummy"):  # the latter as before a download
        with (
            pytest.raises(CheckpointError, match="quant_algo 'NVFP4' of modelopt"),
            open_weights(
                resolve(str(tmp_path / "quantized"), load_format=load_format),
                load_format=load_format,
                dtype=torch.float32,
            ),
        ):
            pass


@pytest.mark.parametrize(
    ("name", "suffix", "value", "message"),
    [
        ("fp8 channels", "weight_scale", None, "up_proj.weight in .* has dtype F8_E4M3; this release reads F32"),
        ("fp8 channels", "weight_scale", torch.nan, "weight_scale has values that are not finite"),
        ("fp8 blocks", "weight_scale_inv", torch.inf, "weight_scale_inv has values that are not finite"),
        ("awq", "scales", torch.nan, "scales has values that are not finite"),
        ("awq", "qzeros", None, "lacks model.layers.1.mlp.up_proj.qzeros"),
        ("gptq by activation", "g_idx", 9, "up_proj: g_idx has groups from 0 to 9 of 4"),
        ("int4", "weight_packed", None, "lacks model.layers.1.mlp.up_proj.weight; fetch"),
        ("gptq", "bias", 1.0, "up_proj.bias is not zero, and config.json does not call for a bias"),
    ],
)
def test_tensors_that_are_refused(
    tmp_path: Path, name: str, suffix: str, value: float | None, message: str
) -> None:
    save_quantized(tmp_path, name)
    with edited_tensors(tmp_path / "quantized") as tensors:
        key = f"model.layers.1.mlp.up_proj.{suffix}"
        if value is None:
            del tensors[key]
        else:
            tensors[key].view(-1)[0] = value
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "quantized")


def test_packed_words_are_those_of_compressed_tensors() -> None:
    """The words are from ``compressed_tensors.pack_to_int32`` 0.20 for the values -8 to 7."""
    words = torch.tensor([[1985229328, -19088744]], dtype=torch.int32)
    assert unpack(words).tolist() == [[float(value) for value in range(16)]]


def _group(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": False}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
COMPRESSED = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "kv_cache_scheme": None}
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False, "group_size": None}
MODELOPT = {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.29.0"}}


@pytest.mark.parametrize(
    ("settings", "scheme"),
    [
        (
            {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
            },
            Fp8Blocks((128, 128), "weight_scale_inv"),
        ),
        (
            COMPRESSED | {"format": "float-quantized", "ignore": ["lm_head"]} | _group(**FP8, actorder=None),
            Fp8Channels("channel"),
        ),
        (
            COMPRESSED | {"format": "pack-quantized"} | _group(**INT4, actorder="weight", zp_dtype=None),
            PackedInt4(128),
        ),
        (COMPRESSED | {"format": "pack-quantized"} | _group(**INT4 | {"strategy": "channel"}), PackedInt4(None)),
        (COMPRESSED | {"transform_config": {}, "sparsity_config": {}} | _group(**FP8), Fp8Channels("channel")),
        (
            {
                "bits": 4,
                "group_size": 128,
                "modules_to_not_convert": None,
                "quant_method": "awq",
                "version": "GEMM",
                "zero_point": True,
            },
            Awq(128),
        ),
        ({"quant_method": "awq", "version": "gemm", "w_bit": 4, "q_group_size": 64, "zero_point": True}, Awq(64)),
        ({"bits": 4, "lm_head": True, "quant_method": "gptq"}, Gptq(128, 1, has_order=False, has_head=True)),
        (
            {
                "bits": 4,
                "damp_percent": 0.01,
                "desc_act": False,
                "group_size": 128,
                "quant_method": "gptq",
                "static_groups": False,
                "sym": True,
                "true_sequential": True,
            },
            Gptq(128, 1, has_order=False),
        ),
        ({"bits": 4, "desc_act": True, "group_size": -1, "quant_method": "gptq"}, Gptq(None, 1, has_order=True)),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, Mxfp4()),
        (COMPRESSED | {"format": "dense", "config_groups": {}, "kv_cache_scheme": KV}, None),
        (COMPRESSED | {"format": "float-quantized", "kv_cache_scheme": KV} | _group(**FP8), Fp8Channels("channel")),
        (MODELOPT | {"quant_algo": "FP8", "kv_cache_scheme": "FP8", "ignore": ["lm_head"]}, Fp8Channels("tensor")),
        (
            MODELOPT | {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": []}},
            Fp8Channels("tensor"),
        ),
        (MODELOPT | {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}, Fp8Channels("tensor")),
        (MODELOPT | {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, None),
    ],
)
def test_settings_that_checkpoints_have(settings: dict[str, Any], scheme: object) -> None:
    assert parse_scheme({"quantization_config": settings}, Path("config.json")) == scheme
    assert parse_scheme({"compression_config": settings}, Path("config.json")) == scheme


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (_group(**INT4, actorder="group"), "actorder 'group'"),
        (_group(**INT4 | {"symmetric": False}), "symmetric False"),
        (_group(**FP8) | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        (_group(**FP8) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (_group(**FP8) | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (_group(**FP8) | {"kv_cache_scheme": KV | {"strategy": "attn_head"}}, "kv_cache_scheme .*'attn_head'"),
        ({"config_groups": {}, "kv_cache_scheme": KV | {"type": "int"}}, "kv_cache_scheme"),
        ({"config_groups": {}, "kv_cache_scheme": None}, "config_groups is {}"),
        (MODELOPT | {"quant_algo": "NVFP4"}, "quant_algo 'NVFP4' of modelopt is not supported .*'FP8' is"),
        (MODELOPT | {"quantization": {"quant_algo": "MIXED_PRECISION"}}, "quant_algo 'MIXED_PRECISION'"),
        (MODELOPT, "quant_algo '' of modelopt"),
        (
            MODELOPT | {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}},
            "kv_cache_quant_algo 'NVFP4'",
        ),
        (
            {"config_groups": {"group_0": {"weights": INT4, "input_activations": {"num_bits": 8, "type": "int"}}}},
            "input_activations beside 4-bit weights",
        ),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format True"),
        ({"quant_method": "awq", "w_bit": 8}, "bits 8"),
    ],
)
def test_settings_that_would_be_misread_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_scheme(
            {"quantization_config": COMPRESSED | {"format": "pack-quantized"} | changes}, Path("config.json")
        )


def test_scales_of_mxfp4_that_are_not_finite(tmp_path: Path) -> None:
    save_quantized(tmp_path, "mxfp4", **CHECKPOINTS["gpt-oss"])
    with edited_tensors(tmp_path / "quantized") as tensors:
        tensors["model.layers.1.mlp.experts.down_proj_scales"][0, 0, 0] = 255
    with pytest.raises(CheckpointError, match="experts.down_proj_scales has values that are not finite"):
        load(tmp_path / "quantized")


def test_a_dense_checkpoint_needs_no_scales_of_what_is_not_quantized(tmp_path: Path) -> None:
    """Formats name modules that stay dense; which matrices are quantized is seen from the files."""
    save_quantized(tmp_path, "fp8 channels")
    key = "model.layers.0.self_attn.o_proj"
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    with edited_tensors(tmp_path / "quantized") as tensors:
        del tensors[f"{key}.weight_scale"]
        tensors[f"{key}.weight"] = dense[f"{key}.weight"]
    with open_weights(resolve(str(tmp_path / "quantized")), load_format="auto", dtype=torch.float32) as weights:
        assert torch.equal(weights.layer(0).output.weight, dense[f"{key}.weight"])
