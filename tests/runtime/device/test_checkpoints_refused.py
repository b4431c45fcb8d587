"""Checkpoints that cannot be run are refused by name; those that can, load whatever their files' form."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device_support import limited_memory
from safetensors.torch import load_file, save_file
from torch import Tensor

from radixkv.errors import CheckpointError
from radixkv.runtime.device.models.config import DecoderConfig, Llama3Scaling
from radixkv.runtime.device.models.weights import DecoderWeights, load_weights
from support.checkpoints import save_llama

CONFIG_PATH = Path("/some/folder/config.json")
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_llama(tmp_path)
    return tmp_path


def load(folder: Path) -> DecoderWeights:
    path = folder / "config.json"
    return load_weights(folder, DecoderConfig.parse(json.loads(path.read_text()), path))


def parse(config: dict[str, Any]) -> DecoderConfig:
    return DecoderConfig.parse(config, CONFIG_PATH)


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def flat(weights: DecoderWeights) -> list[Tensor]:
    return [
        weights.embedding,
        weights.final_norm,
        weights.head,
        *(t for part in weights.layers for t in vars(part).values()),
    ]


def test_a_missing_tensor(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop(K_PROJ))
    with pytest.raises(CheckpointError, match=f"lacks {K_PROJ}"):
        load(folder)


def test_a_tensor_too_many(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(CheckpointError, match=r"model.layers.0.self_attn.q_proj.bias"):
        load(folder)


def test_a_wrong_shape(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({K_PROJ: torch.zeros(16, 48)}))
    with pytest.raises(CheckpointError, match=rf"{K_PROJ} .* shape \[16, 48\].* \[32, 48\]"):
        load(folder)


def test_a_wrong_dtype(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({K_PROJ: torch.zeros(32, 48, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=rf"{K_PROJ} .* dtype I8"):
        load(folder)


@pytest.mark.parametrize("left", [0, 4, 2000, -1])
def test_a_truncated_file(folder: Path, left: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=r"model.safetensors is not a whole safetensors file"):
        load(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"weights must be safetensors"):
        load(folder)


def shard(folder: Path) -> dict[str, str]:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for i, name in enumerate(("a.safetensors", "b.safetensors")):
        part = {key: tensors[key] for key in sorted(tensors)[i::2]}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_several_files_are_one_checkpoint(folder: Path) -> None:
    whole = flat(load(folder))
    shard(folder)
    assert all(torch.equal(a, b) for a, b in zip(flat(load(folder)), whole, strict=True))


def test_a_missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names b.safetensors"):
        load(folder)


def test_a_tensor_in_two_files(folder: Path) -> None:
    shard(folder)
    tensors = load_file(folder / "b.safetensors") | {"model.norm.weight": torch.ones(48)}
    save_file(tensors | load_file(folder / "a.safetensors"), folder / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"is in a.safetensors and in b.safetensors"):
        load(folder)


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {"x": "../x.safetensors"}}'])
def test_a_bad_index(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index.json"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_become_float32(folder: Path, dtype: torch.dtype) -> None:
    whole = flat(load(folder))
    change(folder, lambda tensors: tensors.update({name: t.to(dtype) for name, t in tensors.items()}))
    for half, full in zip(flat(load(folder)), whole, strict=True):
        assert half.dtype == torch.float32
        assert torch.equal(half, full.to(dtype).float())


def test_a_head_beside_a_tied_embedding_is_not_used(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load(folder)
    assert weights.head is weights.embedding


def test_older_checkpoints_may_bring_rotary_frequencies(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.layers.2.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load(folder)


BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "'MistralForCausalLM' is not supported"),
        ({"architectures": None}, "architectures is None"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "has no factor"),
        ({"rope_parameters": {"rope_type": "llama3"} | LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": 3}}, "rope_type is 3"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"hidden_size": "48"}, "hidden_size is '48'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": -1}, "rope_theta is -1"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^/some/folder/config.json: .*{message}"):
        parse(BASE | changes)


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("n_layers", [2, 4, 10**9])
def test_a_layer_count_that_the_files_do_not_hold(folder: Path, n_layers: int) -> None:
    edit_config(folder, num_hidden_layers=n_layers)
    message = f"^{folder}/config.json: num_hidden_layers is {n_layers}, .* hold 3 layers; fetch"
    with limited_memory(), pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    "name", ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim"]
)
def test_other_sizes_that_the_files_do_not_have(folder: Path, name: str) -> None:
    edit_config(folder, **{name: 10**12})
    with limited_memory(), pytest.raises(CheckpointError, match=f"in {folder}/model.safetensors has shape"):
        load(folder)


def test_both_forms_of_rope_settings() -> None:
    old = parse(BASE | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3})
    new = parse(BASE | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3})
    assert old == new
    assert old.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    plain = parse(BASE | {"rope_scaling": None})
    assert (plain.rope_theta, plain.rope_scaling, plain.head_dim, plain.n_kv_heads) == (10_000.0, None, 12, 4)
