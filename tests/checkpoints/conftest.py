"""Fixtures: a hub server and small checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from support.hub import Hub, run_hub


@pytest.fixture
def hub() -> Iterator[Hub]:
    with run_hub() as hub:
        yield hub


@pytest.fixture
def checkpoint_files() -> dict[str, bytes]:
    return {
        "config.json": json.dumps(
            {"vocab_size": 64, "max_position_embeddings": 128, "eos_token_id": 2, "model_type": "llama"}
        ).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [5, 7]}).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": save({"weight": np.arange(4, dtype=np.float32)}),
    }


@pytest.fixture
def checkpoint_folder(tmp_path: Path, checkpoint_files: dict[str, bytes]) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name, content in checkpoint_files.items():
        (folder / name).write_bytes(content)
    return folder
