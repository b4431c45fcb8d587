"""A head beside ``tie_word_embeddings`` is used where it differs from the embedding, as in Transformers 5."""

from __future__ import annotations

import json
import logging
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from radixkv.checkpoints import resolve
from radixkv.errors import CheckpointError
from radixkv.runtime.device.cuda.model_size import model_size
from radixkv.runtime.device.weights.open import open_weights
from support.cases import covering, rest_nightly
from support.checkpoints import VOCAB, edited_config, edited_tensors, save_checkpoint
from support.device_support import CHECKPOINTS, load_oracle, logits_of, random_ids
from support.quantized_checkpoints import FORMATS, quantize_matrices, save_quantized

IDS = random_ids(30, seed=1)
TIED = {"tie_word_embeddings": True}
OWN_HEADS = {
    "own": lambda embedding: torch.randn(embedding.shape, generator=torch.Generator().manual_seed(3)),
    "last row differs": lambda embedding: torch.cat([embedding[:-1], embedding[-1:] + 1]),
    "copy": lambda embedding: embedding.clone(),
}


def embedding_name(tensors: dict[str, Tensor]) -> str:
    return next(name for name in tensors if name.endswith("embed_tokens.weight"))


def logits(folder: Path) -> Tensor:
    return logits_of(folder, IDS)


def expected_logits(folder: Path) -> Tensor:
    with torch.inference_mode():
        return load_oracle(resolve(str(folder)))(torch.tensor([IDS])).logits[0]


def save_tied(folder: Path, name: str, head: str | None = None, **changes: Any) -> None:
    """Saves a tied checkpoint with a head of ``OWN_HEADS``; None: without one."""
    save_checkpoint(folder, **(CHECKPOINTS[name] | TIED | changes))
    if head is not None:
        with edited_tensors(folder) as tensors:
            tensors["lm_head.weight"] = OWN_HEADS[head](tensors[embedding_name(tensors)])


@pytest.mark.parametrize(
    "name", ["grouped", "mistral", "mixtral", "qwen2", "qwen3", "qwen3-moe", "gemma3", "gpt-oss", "opt"]
)
def test_a_head_of_its_own_is_used_by_every_architecture(tmp_path: Path, name: str) -> None:
    save_tied(tmp_path, name, "own")
    assert (logits(tmp_path) - expected_logits(tmp_path)).abs().max() < 1e-4


@pytest.mark.parametrize(("head", "is_sharded"), covering([*OWN_HEADS], [True, False]))
def test_only_a_head_that_differs_is_kept(
    tmp_path: Path, head: str, is_sharded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    save_tied(tmp_path, "grouped", head)
    if is_sharded:
        tensors = load_file(tmp_path / "model.safetensors")
        (tmp_path / "model.safetensors").unlink()
        shards = {
            "head.safetensors": ["lm_head.weight"],
            "rest.safetensors": sorted(tensors.keys() - {"lm_head.weight"}),
        }
        for file, names in shards.items():
            save_file({name: tensors[name] for name in names}, tmp_path / file, {"format": "pt"})
        weight_map = {name: file for file, names in shards.items() for name in names}
        (tmp_path / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    assert (logits(tmp_path) - expected_logits(tmp_path)).abs().max() < 1e-4
    is_own = head != "copy"
    assert is_own == any(
        "lm_head" in record.message for record in caplog.records if record.levelno == logging.WARNING
    )
    with open_weights(resolve(str(tmp_path)), load_format="auto", dtype=torch.float32) as weights:
        assert weights.config.tied_head != is_own


def test_the_memory_that_a_plan_shows_counts_a_head_of_its_own(tmp_path: Path) -> None:
    for head in (None, "own", "copy"):
        save_tied(tmp_path / str(head), "grouped", head, head_dim=64)
    without, own, copy = (model_size(resolve(str(tmp_path / name))) for name in ("None", "own", "copy"))
    assert without == copy
    assert own.n_values - copy.n_values == VOCAB * 48
    assert own.weight_bytes - copy.weight_bytes == 2 * VOCAB * 48


def test_heads_are_compared_as_they_are_loaded(tmp_path: Path) -> None:
    save_tied(tmp_path, "grouped")
    with edited_tensors(tmp_path) as tensors:
        name = embedding_name(tensors)
        tensors |= {name: tensors[name].bfloat16(), "lm_head.weight": tensors[name]}
    for dtype, is_tied in {torch.float32: False, torch.bfloat16: True}.items():
        with open_weights(resolve(str(tmp_path)), load_format="auto", dtype=dtype) as weights:
            assert weights.config.tied_head == is_tied


def test_a_head_alone_is_the_embedding_too(tmp_path: Path) -> None:
    save_tied(tmp_path, "grouped")
    whole = logits(tmp_path)
    with edited_tensors(tmp_path) as tensors:
        tensors["lm_head.weight"] = tensors.pop(embedding_name(tensors))
    assert torch.equal(logits(tmp_path), whole)
    assert (expected_logits(tmp_path) - whole).abs().max() < 1e-4


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    save_tied(tmp_path, "grouped")
    with edited_tensors(tmp_path) as tensors:
        tensors["lm_head.weight"] = torch.zeros(VOCAB + 1, 48)
    with pytest.raises(CheckpointError, match=r"lm_head.weight in .* has shape \[212, 48\]"):
        logits(tmp_path)


@pytest.mark.parametrize(
    ("name", "is_quantized"),
    rest_nightly(product([name for name in FORMATS if name != "mxfp4"], [True, False]), kept=range(0, 32, 9)),
)
def test_a_head_of_its_own_beside_quantized_matrices(tmp_path: Path, name: str, is_quantized: bool) -> None:
    vocabulary = VOCAB + 5  # whole words of 4-bit integers
    save_quantized(tmp_path, name, vocab_size=vocabulary, **TIED)
    head = torch.randn(vocabulary, 64, generator=torch.Generator().manual_seed(3)) * 0.1
    quantize, settings = FORMATS[name]
    matrices = {"lm_head.weight"} if is_quantized else set()
    added: tuple[dict[str, Any], ...] = quantize_matrices({"lm_head.weight": head}, matrices, quantize)
    for kind, parts in zip(("quantized", "dense"), added, strict=True):
        with edited_tensors(tmp_path / kind) as tensors:
            tensors |= {part: tensor.contiguous() for part, tensor in parts.items()}
    if is_quantized and settings["quant_method"] == "gptq":
        with edited_config(tmp_path / "quantized") as config:
            config["quantization_config"]["lm_head"] = True
    assert torch.equal(logits(tmp_path / "quantized"), logits(tmp_path / "dense"))
    assert (logits(tmp_path / "dense") - expected_logits(tmp_path / "dense")).abs().max() < 1e-4
    with open_weights(
        resolve(str(tmp_path / "quantized")), load_format="auto", dtype=torch.float32, products=["fp8", "int4"]
    ) as weights:
        assert weights.head().shape == head.shape
        assert (weights.dequantizing_bytes >= 16 * head.numel()) >= is_quantized
