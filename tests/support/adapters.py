"""Folders of LoRA adapters, written as PEFT writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_BITS = {"F32": "<u4", "F16": "<u2", "BF16": "<u2"}
"""NumPy types of as many bits."""


class Sizes(NamedTuple):
    """Of an adapted module."""

    rank: int
    n_in: int
    n_out: int


class Entry(NamedTuple):
    """A tensor of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def adapter_config(**changes: Any) -> dict[str, Any]:
    """Returns the fields that PEFT 0.21.2 saves, of an adapter of rank 4 of ``q_proj`` and ``v_proj``."""
    fields = {
        "alora_invocation_tokens": None,
        "alpha_pattern": {},
        "arrow_config": None,
        "auto_mapping": None,
        "base_model_name_or_path": "org/base",
        "bias": "none",
        "corda_config": None,
        "ensure_weight_tying": False,
        "eva_config": None,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "kasa_config": None,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": 8,
        "lora_bias": False,
        "lora_dropout": 0.05,
        "lora_ga_config": None,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "monteclora_config": None,
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "r": 4,
        "rank_pattern": {},
        "revision": None,
        "target_modules": ["q_proj", "v_proj"],
        "target_parameters": None,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": None,
        "use_bdlora": None,
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
        "velora_config": None,
    }
    return fields | changes


def layer_modules(*ends: str, n_layers: int = 2, layers: str = "model.layers.") -> dict[str, Sizes]:
    """Returns modules of rank 4, of 8 inputs and 6 outputs, in each layer."""
    return {f"{layers}{layer}.{end}": Sizes(4, 8, 6) for layer in range(n_layers) for end in ends}


def adapter_tensors(modules: Mapping[str, Sizes], dtype: str = "F32") -> dict[str, Entry]:
    """Returns tensors of random bits by PEFT's names."""
    generator = np.random.default_rng(0)
    return {
        f"base_model.model.{module}.lora_{half}.weight": tensor_entry(shape, dtype, generator)
        for module, (rank, n_in, n_out) in modules.items()
        for half, shape in (("A", (rank, n_in)), ("B", (n_out, rank)))
    }


def tensor_entry(shape: tuple[int, ...], dtype: str = "F32", generator: np.random.Generator | None = None) -> Entry:
    """Returns a tensor of random bits; of zeros without a generator."""
    bits = np.dtype(_BITS[dtype])
    zeros = np.zeros(shape, bits)
    values = zeros if generator is None else generator.integers(0, 2 ** (8 * bits.itemsize), shape, bits)
    return Entry(dtype, shape, values.tobytes())


def safetensors_content(tensors: Mapping[str, Entry]) -> bytes:
    """Returns a safetensors file with the tensors in their order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(entry.data for entry in tensors.values())


def write_adapter(
    folder: Path,
    modules: Mapping[str, Sizes] | None = None,
    *,
    dtype: str = "F32",
    extra: Mapping[str, Entry] | None = None,
    without: tuple[str, ...] = (),
    **changes: Any,
) -> Path:
    """Writes an adapter and returns its folder.

    Args:
        folder: new or existing.
        modules: adapted ones; None: ``q_proj`` and ``v_proj`` of two layers.
        dtype: of the tensors.
        extra: more tensors.
        without: names of tensors to leave out.
        changes: of ``adapter_config``.
    """
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(**changes), indent=2))
    modules = layer_modules("self_attn.q_proj", "self_attn.v_proj") if modules is None else modules
    tensors = adapter_tensors(modules, dtype) | dict(extra or {})
    content = safetensors_content({name: tensor for name, tensor in tensors.items() if name not in without})
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder
