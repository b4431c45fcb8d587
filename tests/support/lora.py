"""Random LoRA adapters of small checkpoints in PEFT's format, the models that they make, and devices with them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from radixkv.runtime.step.adapters import DeviceAdapters, ReadAdapter

ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "out_proj"})
MLP = frozenset({"gate_proj", "up_proj", "down_proj", "fc1", "fc2"})
_PREFIX = "base_model.model."


def linear_modules(model: PreTrainedModel, ends: Collection[str] = ATTENTION | MLP) -> list[str]:
    """Returns the names of the linear modules of a text model's layers that end so, in attention and plain MLPs."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and ".layers." in f".{name}"
        and name.rpartition(".")[2] in ends
        and not any(part in name for part in ("expert", "visual", "linear_attn"))
    ]


def save_adapter(
    folder: Path, model: PreTrainedModel, modules: Iterable[str], *, seed: int, rank: int = 4, **changes: Any
) -> Path:
    """Saves a random adapter of some modules of a model; ``changes`` go into its configuration."""
    shapes = {name: tuple(model.get_submodule(name).weight.shape) for name in modules}  # type: ignore[union-attr]
    return write_adapter(folder, shapes, seed=seed, rank=rank, **changes)


def write_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, int]], *, seed: int, rank: int = 4, **changes: Any
) -> Path:
    """Saves a random adapter of modules with these numbers of outputs and inputs; see ``save_adapter``."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, (n_out, n_in) in sorted(shapes.items()):
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = torch.randn(rank, n_in, generator=generator) * n_in**-0.5
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = torch.randn(n_out, rank, generator=generator) * 0.3
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(shapes),
        "bias": "none",
        **changes,
    }
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merge(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Adds an adapter to the weights of a model, and returns the model."""
    config, tensors = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
    )
    scale = config["lora_alpha"] / config["r"] ** (0.5 if config.get("use_rslora") else 1.0)
    with torch.no_grad():
        for name in {key.removeprefix(_PREFIX).rpartition(".lora_")[0] for key in tensors}:
            a, b = (tensors[f"{_PREFIX}{name}.lora_{half}.weight"] for half in "AB")
            model.get_submodule(name).weight.add_(scale * (b @ a))  # type: ignore[operator, union-attr]
    return model


def put_in_slot(adapters: DeviceAdapters, prepared: ReadAdapter) -> str:
    """Loads an adapter and copies it into a free slot of a device; returns its digest."""
    prepared.put()
    copy = adapters.copy(prepared.digest)
    copy.fill()
    copy.put()
    return prepared.digest
