"""Small random checkpoints, written by Transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

VOCAB = 211


_SETTINGS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def save_llama(path: Path, **changes: Any) -> None:
    """Saves a Llama checkpoint of three layers with grouped heads; ``changes`` go into its ``LlamaConfig``."""
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(**(_SETTINGS | changes))).save_pretrained(path)


def save_checkpoint(path: Path, *, model_type: str = "llama", max_shard_size: str = "1GB", **changes: Any) -> None:
    """Saves a checkpoint of any architecture, of the same size; ``changes`` go into its config.

    With a ``vision_config`` among them, and an ``audio_config``, the others go into its ``text_config``.

    Norms and biases are random too: the ones and zeros of a fresh model would hide that two are confused.
    """
    torch.manual_seed(7)
    model = _model(model_type, **(_SETTINGS | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("_bias"):
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.2)
            elif name.endswith("e_score_correction_bias"):
                buffer.normal_(-0.5, 0.5)
    model.save_pretrained(path, max_shard_size=max_shard_size)


def _model(
    model_type: str,
    *,
    vision_config: dict[str, Any] | None = None,
    audio_config: dict[str, Any] | None = None,
    **text: Any,
) -> PreTrainedModel:
    """Returns a random model, with vision and hearing if their sizes are given."""
    model: PreTrainedModel
    if vision_config is None:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **text))
    else:
        parts = {"text_config": text, "vision_config": dict(vision_config)}
        if audio_config is not None:
            parts["audio_config"] = dict(audio_config)
        config = AutoConfig.for_model(model_type, **parts, tie_word_embeddings=text["tie_word_embeddings"])
        model = AutoModelForImageTextToText.from_config(config)
    return model


@contextmanager
def edited_config(folder: Path) -> Iterator[dict[str, Any]]:
    """Lets a test change ``config.json``."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    yield config
    path.write_text(json.dumps(config))


@contextmanager
def edited_tensors(folder: Path) -> Iterator[dict[str, Tensor]]:
    """Lets a test change the tensors of a checkpoint with one file of weights."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    yield tensors
    save_file(tensors, path, {"format": "pt"})
