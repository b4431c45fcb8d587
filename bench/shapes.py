"""Models of random weights: a ``config.json`` alone (``load_format="dummy"``), or with a checkpoint.

As a script, writes one with a tokenizer, which servers of all engines need. Its tokens are words, one for each id:

    python bench/shapes.py FOLDER
    python bench/shapes.py FOLDER --small      # to try a benchmark without a GPU
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.weights.safetensors import RandomTensors
from radixkv.runtime.device.weights.shapes import tensor_shapes

Config = dict[str, Any]

LLAMA_8B: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
"""Configuration of Llama 3.1 8B."""

LLAMA_70B: Config = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
"""Configuration of Llama 3.1 70B."""

_QWEN3_SIZES = {
    "0.6B": (28, 1024, 3072, 16),
    "1.7B": (28, 2048, 6144, 16),
    "4B": (36, 2560, 9728, 32),
    "8B": (36, 4096, 12_288, 32),
    "32B": (64, 5120, 25_600, 64),
}
QWEN3: dict[str, Config] = {
    size: {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    for size, (n_layers, hidden, inner, n_heads) in _QWEN3_SIZES.items()
}
"""Configurations of the dense models of Qwen3, by size."""

QWEN3_30B_A3B: Config = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
"""Configuration of Qwen3-30B-A3B, a mixture of experts."""

LLAMA_8B_INT4: Config = LLAMA_8B | {
    "quantization_config": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
    },
}
"""Configuration of Llama 3.1 8B in AWQ's format."""

QWEN35_9B: Config = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "torch_dtype": "bfloat16",
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "mamba_ssm_dtype": "float32",
}
"""Configuration of the text part of Qwen3.5 9B, three of whose four layers are gated delta nets."""

QWEN36_35B_A3B: Config = QWEN35_9B | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
"""Configuration of the text part of Qwen3.5 and Qwen3.6 35B-A3B."""

QWEN36_35B_A3B_FP8: Config = QWEN36_35B_A3B | {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [
            f"model.layers.{layer}.{name}"
            for layer in range(QWEN36_35B_A3B["num_hidden_layers"])
            for name in (
                *("linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.in_proj_ba"),
                *("mlp.gate", "mlp.shared_expert_gate"),
            )
        ],
    },
}
"""The same in FP8 with a scale for each block. Other engines read which matrices are not; radixkv, whose dummy
weights are in FP8 where the format allows it, leaves out the same ones."""

NEMOTRON_NANO_9B: Config = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "torch_dtype": "bfloat16",
    "vocab_size": 131_072,
    "hidden_size": 4480,
    "intermediate_size": 15_680,
    "num_hidden_layers": 56,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 80,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "mamba_hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 131_072,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
"""Configuration of Nemotron Nano 9B v2: 27 layers of Mamba2, 25 MLPs and 4 layers with attention."""

NEMOTRON_3_NANO: Config = NEMOTRON_NANO_9B | {
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 262_144,
}
"""Configuration of Nemotron 3 Nano: 23 layers of Mamba2, 23 mixtures of experts, 6 layers with attention."""

MODELS: dict[str, Config] = {
    "llama-8b": LLAMA_8B,
    "llama-8b-int4": LLAMA_8B_INT4,
    "llama-70b": LLAMA_70B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3.5-9b": QWEN35_9B,
    "qwen3.6-35b-a3b": QWEN36_35B_A3B,
    "qwen3.6-35b-a3b-fp8": QWEN36_35B_A3B_FP8,
    "nemotron-nano-9b-v2": NEMOTRON_NANO_9B,
    "nemotron-3-nano": NEMOTRON_3_NANO,
}
"""Configurations by the name that ``--model`` of benchmarks takes."""
LABELS = {
    "llama-8b": "llama-3.1-8b",
    "llama-8b-int4": "llama-3.1-8b in 4 bits",
    "llama-70b": "llama-3.1-70b",
    "qwen3-30b-a3b": "qwen3-30b-a3b",
    "qwen3.5-9b": "qwen3.5-9b",
    "qwen3.6-35b-a3b": "qwen3.6-35b-a3b",
    "qwen3.6-35b-a3b-fp8": "qwen3.6-35b-a3b in FP8",
    "nemotron-nano-9b-v2": "nemotron-nano-9b-v2",
    "nemotron-3-nano": "nemotron-3-nano-30b-a3b",
}
"""Models as result lines name them."""

SMALL: Config = LLAMA_8B | {
    "vocab_size": 32_000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
"""A small version of Llama, to try a benchmark without a GPU."""

SMALL_HYBRID: Config = QWEN35_9B | {
    "vocab_size": 32_000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
"""A small version of Qwen3.5, with three gated delta nets before its attention layer."""

SMALL_WINDOWS: Config = SMALL | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "head_dim": 64,
    "sliding_window": 64,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 64,
    "rope_local_base_freq": 10_000.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
"""A small version of Gemma 3, in which every other layer has a window of 64 tokens."""


def write_model(config: Config, folder: Path) -> Path:
    """Writes the model's ``config.json``; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_weights(config: Config, folder: Path, device: str) -> None:
    """Writes random weights into safetensors files beside ``config.json``, one for each layer, in bfloat16.

    Each engine has dummy weights of its own, and its experts get other shares of the tokens. With a checkpoint all
    engines have the same.
    """
    shapes = tensor_shapes(DecoderConfig.parse(config, folder / "config.json"))
    random = RandomTensors(shapes, torch.bfloat16, torch.device(device))
    files: dict[str, str] = {}
    for name in shapes:
        layer = re.search(r"\.\d+\.", name)
        files[name] = f"model{layer[0] if layer else '.'}safetensors"
    for file in sorted(set(files.values())):
        tensors = {}
        for name in (name for name, own in files.items() if own == file):
            tensors[name] = torch.empty(shapes[name], dtype=torch.bfloat16, device=device)
            random.fill(name, tensors[name])
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, folder / file)
    index = json.dumps({"metadata": {}, "weight_map": files})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def write_adapter(config: Config, folder: Path, rank: int, seed: int, **fields: Any) -> Path:
    """Writes a random LoRA adapter of all projections in PEFT's format, in bfloat16; returns its folder.

    ``fields`` are added to its configuration.
    """
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    n_queries, n_keys = (config[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "self_attn.q_proj": (n_queries, hidden),
        "self_attn.k_proj": (n_keys, hidden),
        "self_attn.v_proj": (n_keys, hidden),
        "self_attn.o_proj": (hidden, n_queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for layer in range(config["num_hidden_layers"]):
        for name, (n_out, n_in) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            for half, shape in (("A", (rank, n_in)), ("B", (n_out, rank))):
                values = torch.randn(shape, generator=generator) * 0.02
                tensors[f"{prefix}.lora_{half}.weight"] = values.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(name.partition(".")[2] for name in shapes),
        "bias": "none",
        "base_model_name_or_path": "model",
    }
    (folder / "adapter_config.json").write_text(json.dumps(about | fields), encoding="utf-8")
    return folder


def write_tokenizer(n_tokens: int, folder: Path) -> None:
    """Writes a tokenizer whose token ``i`` is the word ``ti``, so that every id of the vocabulary has a text."""
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(n_tokens)}, "unk_token": "t0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")


def layer_matrices(config: Config) -> list[tuple[int, int]]:
    """Returns the shapes of a layer's fused matrices, [out, in]: query-key-value, output, gate-up, down."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    return [(query + 2 * key, hidden), (hidden, query), (2 * inner, hidden), (hidden, inner)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true", help="a small model")
    arguments = parser.parse_args()
    config = SMALL if arguments.small else LLAMA_8B
    write_tokenizer(config["vocab_size"], write_model(config, arguments.folder))


if __name__ == "__main__":
    main()
