"""The shapes of models that benchmarks use have the sizes that are published."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from radixkv.checkpoints import resolve
from radixkv.runtime.device.cuda.model_size import model_size
from support.paths import ROOT

BILLIONS = {
    "llama-8b": 8.0,
    "llama-8b-int4": 8.0,
    "llama-70b": 70.6,
    "qwen3-30b-a3b": 30.5,
    "qwen3.5-9b": 9.0,
    "qwen3.6-35b-a3b": 34.7,
    "qwen3.6-35b-a3b-fp8": 34.7,
    "nemotron-nano-9b-v2": 8.9,
    "nemotron-3-nano": 31.6,
}
"""Parameters, of text models without heads for drafts."""


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module("shapes")


@pytest.mark.parametrize("name", BILLIONS)
def test_sizes_are_those_of_the_model(name: str, shapes: Any, tmp_path: Path) -> None:
    size = model_size(resolve(str(shapes.write_model(shapes.MODELS[name], tmp_path)), load_format="dummy"))
    assert round(size.n_values / 1e9, 1) == BILLIONS[name]


def test_all_have_a_size_and_a_label(shapes: Any) -> None:
    assert shapes.MODELS.keys() == shapes.LABELS.keys() == BILLIONS.keys()


def test_the_chat_model_without_weights_is_llama_with_the_embedded_tokenizer(shapes: Any, tmp_path: Path) -> None:
    write_chat_model = importlib.import_module("paused_agents").write_chat_model
    size = model_size(resolve(str(write_chat_model(tmp_path)), load_format="dummy"))
    assert 6.5e9 < size.n_values < 8.1e9  # its vocabulary is smaller
    tiny = resolve("tiny").folder
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (tiny / name).read_bytes()
