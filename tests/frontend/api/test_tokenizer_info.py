"""What is shown of a tokenizer's configuration, in the layouts that checkpoints have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radixkv.checkpoints.embedded import embedded_folder
from radixkv.errors import CheckpointError
from radixkv.frontend.api.tokenize import read_tokenizer_info

END = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "special": True}


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


def test_tokens_are_texts_and_paths_are_left_out(tmp_path: Path) -> None:
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "eos_token": END,
        "pad_token": None,
        "added_tokens_decoder": {"2": END},
        "additional_special_tokens": [END, "<x>"],
        "vocab_file": "/home/someone/vocab.json",
        "name_or_path": "/home/someone",
        "model_max_length": 4096,
    }
    write(tmp_path, "tokenizer_config.json", config)
    write(tmp_path, "special_tokens_map.json", {"eos_token": "<older>"})
    assert read_tokenizer_info(tmp_path) == {
        "tokenizer_class": "LlamaTokenizer",
        "eos_token": "</s>",
        "pad_token": None,
        "added_tokens_decoder": {"2": "</s>"},
        "additional_special_tokens": ["</s>", "<x>"],
        "model_max_length": 4096,
    }


def test_older_checkpoints_have_their_tokens_in_a_file_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", {"eos_token": "<wrong>", "model_max_length": 7})
    write(tmp_path, "special_tokens_map.json", {"eos_token": END, "bos_token": "<s>"})
    found = read_tokenizer_info(tmp_path)
    assert (found["eos_token"], found["bos_token"], found["model_max_length"]) == ("</s>", "<s>", 7)
    assert found["tokenizer_class"]


def test_special_tokens_are_those_of_transformers() -> None:
    from transformers import AutoTokenizer

    found = read_tokenizer_info(embedded_folder())
    expected = AutoTokenizer.from_pretrained(embedded_folder())
    assert (found["eos_token"], found["bos_token"]) == (expected.eos_token, expected.bos_token)


def test_a_checkpoint_without_a_configuration_has_little_to_show(tmp_path: Path) -> None:
    assert set(read_tokenizer_info(tmp_path)) == {"tokenizer_class"}
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        read_tokenizer_info(tmp_path)
