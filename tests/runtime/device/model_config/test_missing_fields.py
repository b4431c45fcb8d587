"""What ``config.json`` leaves out is as in Transformers' configuration class, or the checkpoint is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from radixkv.checkpoints import resolve
from radixkv.errors import CheckpointError
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.model_config.families import ARCHITECTURES
from support.checkpoints import edited_config, save_checkpoint
from support.device_support import CHECKPOINTS, HYBRIDS, load_oracle, logits_of, random_ids

Config = dict[str, Any]

# No size is a default of Transformers, and every default number of key-value heads divides that of heads.
SIZES = {
    "vocab_size": 300,
    "hidden_size": 640,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 64,
    "num_key_value_heads": 16,
    "max_position_embeddings": 1024,
}
SHARED = {**SIZES, "head_dim": 16, "rms_norm_eps": 1e-4, "tie_word_embeddings": False}
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",  # of its text_config
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",  # of its text_config
    "Gemma4UnifiedForCausalLM": "gemma4_unified_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified_text",  # of its text_config
    "GptOssForCausalLM": "gpt_oss",
    "NemotronHForCausalLM": "nemotron_h",
    "OPTForCausalLM": "opt",
}


MIXTURE = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": None}  # each fourth one has attention
FIVE_LAYERS = {"num_hidden_layers": 5, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 6}
MORE = {
    "Gemma4ForCausalLM": FIVE_LAYERS,
    "Gemma4ForConditionalGeneration": {**FIVE_LAYERS, "enable_moe_block": True, **MIXTURE},
    "Gemma4UnifiedForCausalLM": {"num_hidden_layers": 4},
    "Gemma4UnifiedForConditionalGeneration": {"num_hidden_layers": 4},
    "OPTForCausalLM": {"word_embed_proj_dim": SIZES["hidden_size"]},
    "Qwen3_5ForCausalLM": FOUR_LAYERS,
    "Qwen3_5ForConditionalGeneration": FOUR_LAYERS,
    "Qwen3_5MoeForCausalLM": FOUR_LAYERS,
    "Qwen3_5MoeForConditionalGeneration": FOUR_LAYERS,
    "Qwen3NextForCausalLM": FOUR_LAYERS,
}


def completed(config: Config) -> Config:
    """Returns a configuration with every field that Transformers' class assumes."""
    copy = json.loads(json.dumps(config))  # Transformers changes nested objects
    settings = {name: value for name, value in copy.items() if name not in ("model_type", "architectures")}
    whole = AutoConfig.for_model(config["model_type"], **settings).to_dict()
    return {**json.loads(json.dumps(whole, default=str)), "architectures": config["architectures"]}


def parse(config: Config) -> DecoderConfig:
    return DecoderConfig.parse(config, Path("config.json"))


def whole_configs() -> Iterator[tuple[str, Config]]:
    """Yields a configuration of every architecture with all fields, as Transformers 5 writes them and as 4 does."""
    for name in ARCHITECTURES:
        settings = next(
            (
                each
                for each in (CHECKPOINTS | HYBRIDS).values()
                if each.get("model_type", "llama") == MODEL_TYPES[name]
            ),
            {},
        )
        more = MORE.get(name, {})
        config = completed({"architectures": [name], "model_type": MODEL_TYPES[name], **settings, **SHARED, **more})
        yield f"{name} 5", dict(config)
        rope = config.pop("rope_parameters", None)
        if rope is None or name.startswith("Gemma4"):  # Transformers 4 had no Gemma 4
            continue
        if "full_attention" in rope:
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        yield f"{name} 4", config


WHOLE = dict(whole_configs())


@pytest.mark.parametrize("name", WHOLE)
def test_each_missing_field_is_as_in_transformers(name: str) -> None:
    config = WHOLE[name]
    expected = parse(config)
    assert parse(completed(config)) == expected
    rope = ["rope_theta", "rope_scaling", "rope_parameters"]
    drops = [[field] for field in config if field not in ("architectures", "model_type")]
    found = {}
    for fields in [*drops, rope, [*rope, "layer_types", "head_dim", "num_key_value_heads"]]:
        rest = {field: value for field, value in config.items() if field not in fields}
        try:
            parsed = parse(rest)
        except CheckpointError:
            found[tuple(fields)] = "refused"
            continue
        assert parsed == parse(completed(rest)), fields
        found[tuple(fields)] = "same" if parsed == expected else "another"
    assert {"refused", "same", "another"} == set(found.values())
    assert found["hidden_size",] == "refused"


@pytest.mark.parametrize("name", [name for name in WHOLE if not name.startswith("OPT")])
def test_an_empty_field_is_as_in_transformers(name: str) -> None:
    for field in (
        "num_key_value_heads",
        "head_dim",
        "sliding_window",
        "layer_types",
        "rope_scaling",
        "rope_parameters",
    ):
        config = {**WHOLE[name], field: None}
        try:
            parsed, whole = parse(config), completed(config)
        except Exception:  # refused here or by Transformers
            continue
        assert parsed == parse(whole), field


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_each_missing_setting_of_scaled_angles_is_as_in_transformers(kind: str) -> None:
    scaling: Config = {"rope_type": kind, "rope_theta": 5e5, "factor": 4.0}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 2.0, "high_freq_factor": 6.0, "original_max_position_embeddings": 128}
    elif kind == "yarn":
        scaling |= {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.5}
        scaling |= {"original_max_position_embeddings": 128}
    n_refused = 0
    for missing in [None, *scaling]:
        rope = {name: value for name, value in scaling.items() if name != missing}
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SHARED, "rope_parameters": rope}
        try:
            found = parse(config).rope
        except CheckpointError:
            n_refused += 1
            continue
        oracle = AutoConfig.for_model("llama", **SHARED, rope_parameters=dict(rope))
        if missing == "rope_type":
            assert found.scaling is None
            assert oracle.rope_parameters["rope_type"] == "default"
            continue
        frequencies, amplitude = ROPE_INIT_FUNCTIONS[kind](oracle, torch.device("cpu"))
        torch.testing.assert_close(found.frequencies(SHARED["head_dim"]), frequencies)
        assert found.amplitude == pytest.approx(amplitude)
    assert n_refused < len(scaling)


def test_gpt_oss_without_rope_and_biases_answers_as_in_transformers(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **(CHECKPOINTS["gpt-oss"] | {"attention_bias": True}))
    with edited_config(tmp_path) as config:
        del config["rope_parameters"]
        config.pop("attention_bias", None)
    ids = random_ids(60, seed=1)
    logits = logits_of(tmp_path, ids)
    with torch.inference_mode():
        expected = load_oracle(resolve(str(tmp_path)))(torch.tensor([ids])).logits[0]
    assert (logits - expected).abs().max() < 1e-4
