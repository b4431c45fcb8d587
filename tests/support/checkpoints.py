"""Small random checkpoints, written as Transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 211


def save_llama(path: Path, **changes: Any) -> None:
    """A Llama checkpoint of three layers with grouped heads; ``changes`` go into its ``LlamaConfig``."""
    settings: dict[str, Any] = {
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
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(**(settings | changes))).save_pretrained(path)
