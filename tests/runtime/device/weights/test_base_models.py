"""Checkpoints of base models, whose tensor names lack the first part, and pickled ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from radixkv.checkpoints import resolve
from radixkv.errors import CheckpointError
from radixkv.runtime.device.weights.open import open_weights
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS, logits_of, random_ids


@pytest.mark.parametrize("name", ["opt", "qwen2"])
def test_a_base_model_with_a_tied_head_is_the_whole_model(tmp_path: Path, name: str) -> None:
    """As Transformers saves the model without its head."""
    save_checkpoint(tmp_path / "whole", **CHECKPOINTS[name])
    AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "base")
    config = (tmp_path / "whole" / "config.json").read_text()
    (tmp_path / "base" / "config.json").write_text(config)
    names = load_file(tmp_path / "base" / "model.safetensors").keys()
    assert not any(each.startswith("model.") for each in names)
    ids = random_ids(40, seed=1)
    assert torch.equal(*(logits_of(tmp_path / kind, ids) for kind in ("whole", "base")))


def test_errors_have_the_names_of_the_files(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **CHECKPOINTS["opt"])
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}
    save_file(tensors | {"decoder.project_in.weight": torch.zeros(2, 2)}, path)
    with (
        pytest.raises(CheckpointError, match=r"does not call for: decoder\.project_in\.weight"),
        open_weights(resolve(str(tmp_path)), load_format="auto", dtype=torch.float32),
    ):
        pass


def test_pickled_weights_load_after_the_conversion_that_the_error_names(tmp_path: Path) -> None:
    """The names are those of the first OPT checkpoints."""
    folder, path = tmp_path / "pickled", tmp_path / "pickled" / "model.safetensors"
    save_checkpoint(folder, **CHECKPOINTS["opt"])
    expected = load_file(path)
    path.unlink()
    torch.save({name.removeprefix("model."): each for name, each in expected.items()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"\*\.bin files") as caught:
        resolve(str(folder))
    found = re.search(r"from_pretrained\('(.+)'\)\.save_pretrained\(", str(caught.value))
    AutoModelForCausalLM.from_pretrained(found[1]).save_pretrained(tmp_path / "converted")
    with open_weights(resolve(str(tmp_path / "converted")), load_format="auto", dtype=torch.float32) as weights:
        assert torch.equal(weights.embedding(), expected["model.decoder.embed_tokens.weight"])
