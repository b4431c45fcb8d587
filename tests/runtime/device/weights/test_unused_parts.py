"""Checkpoints that have more than a decoder: vision and a head for drafts are skipped by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from radixkv.checkpoints import resolve
from radixkv.errors import CheckpointError
from radixkv.runtime.device.weights.open import open_weights
from support.checkpoints import edited_tensors, save_checkpoint
from support.device_support import HYBRIDS, load_oracle, logits_of, random_ids

IDS = random_ids(40, seed=1)
DRAFTS = ("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "mtp.layers.0.mlp.up_proj.weight_scale_inv")


def add_tensors(folder: Path, *names: str) -> None:
    with edited_tensors(folder) as tensors:
        tensors.update({name: torch.full((3, 5), torch.nan) for name in names})


def expected(folder: Path) -> Tensor:
    with torch.inference_mode():
        return load_oracle(resolve(str(folder)))(torch.tensor([IDS])).logits[0]


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_text_model_of_a_checkpoint_with_vision_and_drafts(tmp_path: Path, is_tied: bool) -> None:
    save_checkpoint(tmp_path, **(HYBRIDS["qwen3.5-vision"] | {"tie_word_embeddings": is_tied}))
    add_tensors(tmp_path, *DRAFTS)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any(name.startswith("model.visual.") for name in names)
    assert ("lm_head.weight" in names) != is_tied
    assert (logits_of(tmp_path, IDS) - expected(tmp_path)).abs().mean() < 2e-4


def test_drafts_beside_a_text_model(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **HYBRIDS["qwen3.5"])
    before = logits_of(tmp_path, IDS)
    add_tensors(tmp_path, *DRAFTS)
    assert torch.equal(logits_of(tmp_path, IDS), before)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen3.5-vision", "model.language_model.layers.0.mlp.extra.weight"),
        ("qwen3.5-vision", "visual.extra.weight"),
        ("qwen3.5", "model.layers.3.mtp.weight"),
    ],
)
def test_other_unexpected_tensors_are_refused(tmp_path: Path, name: str, tensor: str) -> None:
    save_checkpoint(tmp_path, **HYBRIDS[name])
    add_tensors(tmp_path, tensor)
    with (
        pytest.raises(CheckpointError, match=f"does not call for: {tensor}"),
        open_weights(resolve(str(tmp_path)), load_format="auto", dtype=torch.float32),
    ):
        pass
