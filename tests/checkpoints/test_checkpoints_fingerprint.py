"""Fingerprints of models: other weights or another config give another one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from radixkv.checkpoints.fingerprint import fingerprint
from radixkv.errors import CheckpointError

SHAPES = {"embed": (300, 64), "q": (64, 64), "norm": (64,), "large": (64, 4096)}
N_SHARDS = 2


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the tensor ``large`` one of two parts."""
    monkeypatch.setattr("radixkv.checkpoints.fingerprint.MAX_PART_BYTES", 2**20)


def save_model(folder: Path, weights: Mapping[str, np.ndarray], config: object = "llama") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": config}))
    for shard in range(N_SHARDS):
        names = list(weights)[shard::N_SHARDS]
        save_file({name: weights[name] for name in names}, folder / f"model-{shard}.safetensors")
    return folder


def random_weights(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def test_a_copy_has_the_same_fingerprint(tmp_path: Path) -> None:
    one, other = (save_model(tmp_path / name, random_weights()) for name in "ab")
    (other / "README.md").write_text("a copy")
    assert fingerprint(one, "auto") == fingerprint(other, "auto")


@pytest.mark.parametrize("name", SHAPES)
def test_training_one_tensor_changes_it(tmp_path: Path, name: str) -> None:
    trained = random_weights()
    trained[name] += np.float32(1e-3)
    folders = [save_model(tmp_path / "before", random_weights()), save_model(tmp_path / "after", trained)]
    assert fingerprint(folders[0], "auto") != fingerprint(folders[1], "auto")


@pytest.mark.parametrize("half", [slice(0, 32), slice(32, 64)])
def test_training_a_part_of_a_large_tensor_changes_it(tmp_path: Path, half: slice) -> None:
    trained = random_weights()
    trained["large"][half] += np.float32(1e-3)
    folders = [save_model(tmp_path / "before", random_weights()), save_model(tmp_path / "after", trained)]
    assert fingerprint(folders[0], "auto") != fingerprint(folders[1], "auto")


def test_config_names_and_dummy_weights_change_it(tmp_path: Path) -> None:
    weights = random_weights()
    renamed = {{"q": "k"}.get(name, name): tensor for name, tensor in weights.items()}
    folders = [
        save_model(tmp_path / "a", weights),
        save_model(tmp_path / "b", weights, config="mistral"),
        save_model(tmp_path / "c", renamed),
    ]
    assert len({*(fingerprint(folder, "auto") for folder in folders), fingerprint(folders[0], "dummy")}) == 4
    assert fingerprint(folders[0], "dummy") == fingerprint(folders[2], "dummy")


@pytest.mark.parametrize("contents", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]", b"\x10\0\0\0\0\0\0\0" + b"x" * 16])
def test_a_corrupt_file_is_an_error(tmp_path: Path, contents: bytes) -> None:
    folder = save_model(tmp_path / "model", random_weights())
    (folder / "model-0.safetensors").write_bytes(contents)
    with pytest.raises(CheckpointError, match="cannot be read"):
        fingerprint(folder, "auto")


def test_a_missing_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        fingerprint(tmp_path, "auto")
