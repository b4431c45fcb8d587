"""Invalid checkpoints are refused with the file and field; valid ones load whatever their file format."""

import json
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from radixkv.checkpoints import resolve
from radixkv.errors import CheckpointError
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.model_config.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling
from radixkv.runtime.device.weights.open import open_weights
from support.cases import nightly_but
from support.checkpoints import edited_config, edited_tensors, save_checkpoint, save_llama
from support.device_support import CHECKPOINTS, OTHERS, limited_memory

CONFIG_PATH = Path("/some/folder/config.json")
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
Q_BIAS = "model.layers.0.self_attn.q_proj.bias"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_llama(tmp_path)
    return tmp_path


def load(folder: Path) -> list[Tensor]:
    """Returns all tensors of the checkpoint."""
    checkpoint = resolve(str(folder), load_format="dummy")
    with open_weights(checkpoint, load_format="auto", dtype=torch.float32) as weights:
        ends = [
            weights.embedding(),
            weights.final_norm().weight,
            *([] if weights.config.tied_head else [weights.head()]),
        ]
        layers = [weights.layer(index) for index in range(weights.config.n_layers)]
    return [*ends, *(tensor for layer in layers for tensor in flat(astuple(layer)))]


def flat(part: object) -> list[Tensor]:
    if isinstance(part, tuple):
        return [tensor for child in part for tensor in flat(child)]
    return [part] if isinstance(part, Tensor) else []


def parse(config: dict[str, Any]) -> DecoderConfig:
    return DecoderConfig.parse(config, CONFIG_PATH)


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    with edited_tensors(folder) as tensors:
        edit(tensors)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop(K_PROJ), f"lacks {K_PROJ}"),
        (lambda tensors: tensors.update({Q_BIAS: torch.zeros(64)}), Q_BIAS),
        (
            lambda tensors: tensors.update({K_PROJ: torch.zeros(16, 48)}),
            rf"{K_PROJ} .* shape \[16, 48\].* \[32, 48\]",
        ),
        (lambda tensors: tensors.update({K_PROJ: torch.zeros(32, 48, dtype=torch.int8)}), f"{K_PROJ} .* dtype I8"),
    ],
    ids=["missing", "unexpected", "shape", "dtype"],
)
def test_a_wrong_tensor(folder: Path, edit: Callable[[dict[str, Tensor]], object], message: str) -> None:
    change(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize("n_bytes", [0, 4, 2000, -1])
def test_a_truncated_file(folder: Path, n_bytes: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:n_bytes])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a complete"):
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
    expected = load(folder)
    shard(folder)
    assert all(torch.equal(a, b) for a, b in zip(load(folder), expected, strict=True))


def test_a_missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names the file 'b.safetensors'"):
        load(folder)


def test_a_tensor_in_two_files(folder: Path) -> None:
    shard(folder)
    tensors = load_file(folder / "b.safetensors") | {"model.norm.weight": torch.ones(48)}
    save_file(tensors | load_file(folder / "a.safetensors"), folder / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"a.safetensors and .*b.safetensors"):
        load(folder)


@pytest.mark.parametrize(
    "index",
    [
        "[]",
        "{",
        "[" * 100_000,
        '{"weight_map": 3}',
        '{"weight_map": {"x": "../x.safetensors"}}',
        json.dumps({"weight_map": {"x": "x" * 300}}),
        json.dumps({"weight_map": {"x": "\ud800"}}),
    ],
)
def test_a_bad_index(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index.json"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_become_float32(folder: Path, dtype: torch.dtype) -> None:
    expected = load(folder)
    change(folder, lambda tensors: tensors.update({name: t.to(dtype) for name, t in tensors.items()}))
    for half, full in zip(load(folder), expected, strict=True):
        assert half.dtype == torch.float32
        assert torch.equal(half, full.to(dtype).float())


def test_rotary_frequencies_of_older_checkpoints_are_ignored(folder: Path) -> None:
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
LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
MISTRAL = {"architectures": ["MistralForCausalLM"]}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 9,
    "num_hidden_layers": 7,
}
OPT = {"architectures": ["OPTForCausalLM"], "activation_function": "relu", "ffn_dim": 64}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "use_sliding_window": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel' .* LlamaForCausalLM, Mistral",
        ),
        ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "architectures is "),
        ({"architectures": None}, "architectures is None"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures is "),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'.* 'default', 'linear'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, " factor"),
        ({"rope_parameters": {"rope_type": "yarn"}}, " factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, " original_max_position_embeddings"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "mscale 1.0"),
        ({"rope_parameters": YARN | {"rope_theta": 1}}, "rope_theta is 1.0; .* above 1"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": 1e300}, r"rope_theta is 1e\+300.* 1e-15 and 1e\+15"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 1e300}}, r"factor is 1e\+300; .* 1e-06 and 1e\+06"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 1e-300}}, "factor is 1e-300"),
        ({"rope_parameters": YARN | {"factor": float("inf")}}, "factor is inf"),
        ({"rope_parameters": YARN | {"attention_factor": 1e300}}, r"attention_factor is 1e\+300"),
        (
            {"rope_parameters": {"rope_type": "llama3"} | LLAMA3 | {"high_freq_factor": 1e300}},
            "high_freq_factor is",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters .*full_attention"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"rope_type": "llama3"}}, " factor"),
        ({"rope_parameters": {"rope_type": "llama3"} | LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": 3}}, "rope_type is 3"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        (MISTRAL | {"attention_bias": True}, "attention_bias True"),
        (MISTRAL | {"mlp_bias": True}, "mlp_bias"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window is 0"),
        (MISTRAL | {"layer_types": ["full_attention"] * 2}, "layer_types "),
        ({"sliding_window": 4096}, "sliding_window 4096"),
        (QWEN3 | {"layer_types": ["sliding_attention"]}, "num_hidden_layers is 2"),
        (QWEN3 | {"layer_types": ["linear_attention"] * 2}, "layer_types .*'sliding_attention'"),
        (QWEN3 | {"max_window_layers": -1}, "max_window_layers is -1"),
        (QWEN3 | {"use_sliding_window": "yes"}, "use_sliding_window is 'yes'"),
        (MIXTRAL | {"num_local_experts": None}, " num_local_experts"),
        (MIXTRAL | {"num_experts_per_tok": 5}, "num_experts_per_tok 5 .*num_local_experts 4"),
        (MIXTRAL | {"mlp_only_layers": [True]}, "mlp_only_layers"),
        (MIXTRAL | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (GEMMA3 | {"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        (GEMMA3 | {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        (GEMMA3 | {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (GEMMA3 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        (GEMMA3 | {"sliding_window": None}, "sliding_window is None"),
        (OPT | {"max_position_embeddings": None}, " max_position_embeddings"),
        (OPT | {"do_layer_norm_before": False}, "do_layer_norm_before False"),
        (OPT | {"word_embed_proj_dim": 32}, "word_embed_proj_dim 32"),
        (OPT | {"enable_bias": False}, "enable_bias False"),
        (OPT | {"activation_function": "gelu"}, "activation_function 'gelu'"),
        (OPT | {"ffn_dim": None}, " ffn_dim"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 .*num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"vocab_size": None}, " vocab_size"),
        ({"hidden_size": "48"}, "hidden_size is '48'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 10+"),
        ({"intermediate_size": 10**400}, "intermediate_size is 10+"),
        ({"rope_theta": -1}, "rope_theta is -1"),
    ],
)
def test_invalid_configs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^/some/folder/config.json: .*{message}"):
        parse(BASE | changes)


def edit_config(folder: Path, **changes: Any) -> None:
    with edited_config(folder) as config:
        config |= changes


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_local_experts", "num_experts"])
def test_a_corrupt_count_is_refused_without_exhausting_memory(folder: Path, name: str) -> None:
    architecture = {"num_local_experts": "MixtralForCausalLM", "num_experts": "Qwen3MoeForCausalLM"}.get(name)
    edit_config(folder, **({"architectures": [architecture], "num_experts_per_tok": 2} if architecture else {}))
    edit_config(folder, **{name: 10**9})
    with limited_memory(), pytest.raises(CheckpointError, match=f"{name} is {10**9}; it must be at most 1000"):
        load(folder)


def test_tensors_with_names_of_another_architecture(folder: Path) -> None:
    edit_config(folder, **{**OPT, "max_position_embeddings": 64})
    with pytest.raises(CheckpointError, match=f"{folder} has no tensors named model.decoder.layers"):
        load(folder)


@pytest.mark.parametrize("n_layers", [2, 4])
def test_a_layer_count_that_differs_from_the_files(folder: Path, n_layers: int) -> None:
    edit_config(folder, num_hidden_layers=n_layers)
    message = f"^{folder}/config.json: num_hidden_layers is {n_layers}, .* 3 layers; fetch"
    with limited_memory(), pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    "name", ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim"]
)
def test_other_sizes_that_differ_from_the_files(folder: Path, name: str) -> None:
    edit_config(folder, **{name: 10**12})
    with limited_memory(), pytest.raises(CheckpointError, match=f"in {folder}/model.safetensors has shape"):
        load(folder)


def test_both_formats_of_rope_settings() -> None:
    old = parse(BASE | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3})
    new = parse(BASE | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3})
    assert old == new
    assert old.rope == Rope(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    plain = parse(BASE | {"rope_scaling": None})
    assert (plain.rope, plain.head_dim, plain.n_kv_heads) == (Rope(10_000.0), 12, 4)


def test_yarn_of_a_model_card() -> None:
    """The settings that Qwen's model cards recommend."""
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    rope = parse(BASE | {"rope_theta": 1e6, "rope_scaling": scaling}).rope
    assert isinstance(rope.scaling, YarnScaling)
    assert (rope.scaling.factor, rope.scaling.original_max_position) == (4.0, 32768)
    assert rope.amplitude == pytest.approx(1.1386, abs=1e-4)


def test_both_formats_of_rope_settings_that_differ_by_layer() -> None:
    old = parse(BASE | GEMMA3 | {"rope_theta": 5e5, "rope_local_base_freq": 7e3, "rope_scaling": LINEAR})
    sections = {"full_attention": {"rope_theta": 5e5} | LINEAR, "sliding_attention": {"rope_theta": 7e3}}
    new = parse(BASE | GEMMA3 | {"rope_parameters": sections})
    assert old == new
    assert (old.rope_of(5), old.rope_of(0)) == (Rope(5e5, LinearScaling(8.0)), Rope(7e3))
    default = parse(BASE | GEMMA3)
    assert (default.rope_of(5), default.rope_of(0)) == (Rope(1e6), Rope(1e4))


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        (MISTRAL, (4096, 4096)),
        (MISTRAL | {"sliding_window": None}, (None, None)),
        (MISTRAL | {"sliding_window": 7}, (7, 7)),
        (MIXTRAL, (None, None)),
        (MIXTRAL | {"sliding_window": 7}, (7, 7)),
        (QWEN3, (None, None)),
        (QWEN3 | {"max_window_layers": 1}, (None, 4096)),
        (QWEN3 | {"max_window_layers": 0, "sliding_window": 9}, (9, 9)),
        (QWEN3 | {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0}, (None, None)),
        (QWEN3 | {"layer_types": ["sliding_attention", "full_attention"]}, (4096, None)),
        (GEMMA3, (9, 9, 9, 9, 9, None, 9)),
        (GEMMA3 | {"sliding_window_pattern": 2}, (9, None) * 3 + (9,)),
        (GEMMA3 | {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}, (None, 9)),
        (QWEN3_MOE, (4096, 4096)),
        (QWEN3_MOE | {"use_sliding_window": None}, (None, None)),
    ],
)
def test_windows_by_layer(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert parse(BASE | changes).windows == windows


def test_a_window_that_no_sequence_exceeds_counts_as_none() -> None:
    config = parse(BASE | QWEN3 | {"sliding_window": 9, "max_window_layers": 1})
    assert (config.windows_within(10), config.windows_within(9)) == ((None, 9), (None, None))


@pytest.mark.parametrize("n_experts", ["num_experts", "num_local_experts"])
def test_layers_with_experts(n_experts: str) -> None:
    changes = {n_experts: 4, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    config = parse(BASE | QWEN3_MOE | {"num_experts": None} | changes)
    assert [layer for layer in range(6) if config.experts_of(layer)] == [1, 5]


@pytest.fixture(params=nightly_but(["biased", *OTHERS], "biased", "gemma4-moe", "gpt-oss"))
def other_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, **CHECKPOINTS[request.param])
    return tmp_path


def test_each_tensor_of_each_architecture_is_checked(other_folder: Path) -> None:
    """Removes each tensor in turn, then gives it a wrong shape. Names and shapes come from Transformers."""
    tensors = load_file(other_folder / "model.safetensors")
    names = [name for name in tensors if ".1." in name or ".layers." not in name]
    assert len(names) >= 11
    for name in names:
        save_file({key: t for key, t in tensors.items() if key != name}, other_folder / "model.safetensors")
        missing = f"{name};"
        if name.startswith("model.layers.1.experts."):  # a stack, in place of which each expert may have a tensor
            missing = r"model.layers.1.experts.0.(gate|down)_proj.weight"
        with pytest.raises(CheckpointError, match=f"lacks {missing}"):
            load(other_folder)
        wrong = torch.zeros(3, *tensors[name].shape)
        save_file(tensors | {name: wrong}, other_folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"{name} .* has shape \[3, "):
            load(other_folder)


def test_sharded_by_transformers(tmp_path: Path) -> None:
    for name, size in (("one", "1GB"), ("many", "40KB")):
        save_checkpoint(tmp_path / name, max_shard_size=size, **CHECKPOINTS["qwen3-moe"])
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = load(tmp_path / "one"), load(tmp_path / "many")
    assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))
