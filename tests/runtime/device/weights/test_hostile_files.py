"""Weight files and configs that lie, or that are links and pipes, are refused before a tensor is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv.checkpoints import resolve
from radixkv.errors import CheckpointError
from radixkv.runtime.device.weights.open import open_weights
from support.checkpoints import edited_config, save_llama
from support.device_support import limited_memory

K_PROJ = "model.layers.1.self_attn.k_proj.weight"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Change = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_llama(tmp_path)
    return tmp_path


def refusal(folder: Path) -> str:
    """Opens the weights, which must fail in bounded time and memory, and returns the reason."""
    checkpoint = resolve(str(folder), load_format="dummy")
    opened = pytest.raises(CheckpointError)
    with limited_memory(), opened as caught, open_weights(checkpoint, load_format="auto", dtype=torch.float32):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def header(**changes: object) -> Change:
    """Changes what the header says about a tensor."""

    def change(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        n_bytes = int.from_bytes(content[:8], "little")
        tensors: dict[str, Any] = json.loads(content[8 : 8 + n_bytes])
        tensors[K_PROJ] |= changes
        changed = json.dumps(tensors).encode()
        (folder / WEIGHTS).write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + n_bytes :])

    return change


def header_bytes(content: bytes, length: int | None = None) -> Change:
    """Replaces the whole header; ``length`` is what the file says of it."""
    n_bytes = len(content) if length is None else length
    return lambda folder: (folder / WEIGHTS).write_bytes(n_bytes.to_bytes(8, "little") + content + bytes(64))


@pytest.mark.parametrize(
    "change",
    [
        header(data_offsets=[0, 1 << 62]),
        header(data_offsets=[0, 1 << 64]),
        header(data_offsets=[500, 100]),
        header(data_offsets=[-1, 5]),
        header(data_offsets=[0, 32 * 48 * 4]),
        header(data_offsets=None),
        header(shape=[1 << 63, 2]),
        header(shape=[1 << 40, 1 << 40]),
        header(shape=[-1, 4]),
        header(dtype="X9"),
        header_bytes(b"{}", (1 << 64) - 1),
        header_bytes(b"{}", 0),
        header_bytes(b"[" * 100_000),
        header_bytes(b"\xff" * 100),
        header_bytes(b"{}"),
    ],
)
def test_a_header_that_lies(folder: Path, change: Change) -> None:
    change(folder)
    assert str(folder) in refusal(folder)


@pytest.mark.parametrize("name", [WEIGHTS, INDEX])
@pytest.mark.parametrize("target", ["/dev/zero", "/dev/null", "/etc", WEIGHTS, INDEX, None])
def test_what_is_no_regular_file(folder: Path, name: str, target: str | None) -> None:
    """Links out of the folder, links in a circle, and pipes, from which reading never ends."""
    (folder / name).unlink(missing_ok=True)
    if target is None:
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(target)
    assert name in refusal(folder)


@pytest.mark.parametrize(
    "name", ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"]
)
def test_a_size_beyond_all_memory(folder: Path, name: str) -> None:
    with edited_config(folder) as config:
        config[name] = 1 << 62
    refusal(folder)
