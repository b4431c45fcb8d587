"""Reading and writing of the trained checkpoint: bfloat16 weights in shards, and the configuration files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from training.chat_format import BEGIN, END, END_OF_TURN
from training.llama import Llama, ModelShape

SHARD_BYTES = 11_500_000
TOP_P = 0.7
"""Recommended to those who sample: the model gives some probability to a role's name after an answer."""


def save(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes all files of the checkpoint except the tokenizer's."""
    tensors = {name: weight.detach().to("cpu", torch.bfloat16) for name, weight in model.state_dict().items()}
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if sum(other.nbytes for other in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor.contiguous()
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        (folder / file_name).chmod(0o644)
        index |= dict.fromkeys(shard, file_name)
    ids = {
        "bos_token_id": tokenizer.token_to_id(BEGIN),
        "eos_token_id": [tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TURN)],
    }
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / "config.json", model.shape.config() | ids)
    write_json(folder / "generation_config.json", ids | {"top_p": TOP_P})
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})


def load(folder: Path, shape: ModelShape) -> Llama:
    """Reads a model written by ``save``, in float32 on the CPU."""
    model = Llama(shape)
    weights: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    model.load_state_dict(weights)
    return model


def write_json(path: Path, content: object) -> None:
    """Writes JSON with one entry per line."""
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
