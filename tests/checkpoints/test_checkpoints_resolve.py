"""Tests of the resolution of models' names, and of its errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models

from radixkv.checkpoints import resolve, resolve_tokenizer
from radixkv.errors import CheckpointError
from support.imports import imported_by


def test_folder(checkpoint_folder: Path) -> None:
    checkpoint = resolve(str(checkpoint_folder))
    assert checkpoint.folder == checkpoint_folder
    assert checkpoint.name == str(checkpoint_folder)
    assert checkpoint.config["model_type"] == "llama"
    assert (checkpoint.vocab_size, checkpoint.max_position_embeddings) == (64, 128)


def test_folder_named_tiny_is_reached_as_a_path(checkpoint_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_folder.rename(checkpoint_folder.with_name("tiny"))
    monkeypatch.chdir(checkpoint_folder.parent)
    assert resolve("./tiny").vocab_size == 64


def test_home_folder_is_expanded(checkpoint_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(checkpoint_folder.parent))
    assert resolve("~/checkpoint").folder == checkpoint_folder


@pytest.mark.parametrize(
    ("generation_config", "eos_token_id", "expected"),
    [
        ({"eos_token_id": [5, 7]}, 2, {2, 5, 7}),
        ({"eos_token_id": 0}, 2, {0, 2}),
        ({}, 2, {2}),
        ({"eos_token_id": None}, [2, 3], {2, 3}),
        (None, 2, {2}),
        (None, None, set()),
    ],
)
@pytest.mark.parametrize(
    ("tokenizer_config", "own"),
    [
        (None, set()),
        ({}, set()),
        ({"eos_token": None}, set()),
        ({"eos_token": "<end>"}, {9}),
        ({"eos_token": {"__type": "AddedToken", "content": "<end>", "lstrip": False}}, {9}),
        ({"eos_token": "a"}, {1}),
        ({"eos_token": "not in the vocabulary"}, set()),
    ],
    ids=str,
)
@pytest.mark.parametrize("model", [models.BPE({"b": 0, "a": 1}, []), models.Unigram([("b", 0.0), ("a", -1.0)], 0)])
def test_end_of_sequence_ids_come_from_all_files(
    checkpoint_folder: Path,
    generation_config: dict[str, object] | None,
    eos_token_id: object,
    expected: set[int],
    tokenizer_config: dict[str, object] | None,
    own: set[int],
    model: models.Model,
) -> None:
    if generation_config is None:
        (checkpoint_folder / "generation_config.json").unlink()
    else:
        (checkpoint_folder / "generation_config.json").write_text(json.dumps(generation_config))
    (checkpoint_folder / "config.json").write_text(json.dumps({"eos_token_id": eos_token_id}))
    backend = tokenizers.Tokenizer(model)
    backend.add_tokens([f"<{index}>" for index in range(7)])
    backend.add_special_tokens(["<end>"])
    backend.save(str(checkpoint_folder / "tokenizer.json"))
    if tokenizer_config is not None:
        (checkpoint_folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    assert resolve(str(checkpoint_folder)).eos_token_ids == expected | own


def test_the_end_of_sequence_of_another_tokenizer_counts(checkpoint_folder: Path, tmp_path: Path) -> None:
    own = resolve(str(checkpoint_folder)).eos_token_ids
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "b"}))
    assert resolve(str(checkpoint_folder), tokenizer_folder=tmp_path).eos_token_ids == own | {1}


def test_fields_of_the_text_model_stand_beside_those_of_the_whole(checkpoint_folder: Path) -> None:
    text = {
        "vocab_size": 64,
        "hidden_size": 8,
        "max_position_embeddings": 128,
        "eos_token_id": 3,
        "dtype": "bfloat16",
    }
    own = {"architectures": None, "tie_word_embeddings": False, "model_type": "qwen3_5_text"}
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "quantization_config": {"quant_method": "fp8"},
        "text_config": text | own,
        "vision_config": {"hidden_size": 5},
    }
    (checkpoint_folder / "config.json").write_text(json.dumps(whole))
    (checkpoint_folder / "generation_config.json").write_text("{}")
    found = resolve(str(checkpoint_folder))
    assert (found.vocab_size, found.hidden_size, found.max_position_embeddings) == (64, 8, 128)
    assert found.eos_token_ids == {3}
    for name in ("architectures", "tie_word_embeddings", "quantization_config"):
        assert found.config[name] == whole[name]
    del whole["tie_word_embeddings"]
    (checkpoint_folder / "config.json").write_text(json.dumps(whole))
    assert resolve(str(checkpoint_folder)).config["tie_word_embeddings"] is False


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b'{"vocab_size": ', b"\xff\xfe", b"[1]", b"", b"[" * 100_000])
def test_corrupt_json_is_one_line(checkpoint_folder: Path, name: str, content: bytes) -> None:
    (checkpoint_folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} .*fetch the file again") as caught:
        resolve(str(checkpoint_folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["2", 2.0, True, -1, [2, None]])
def test_wrong_end_of_sequence_id(checkpoint_folder: Path, value: object) -> None:
    (checkpoint_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id is .*token id"):
        resolve(str(checkpoint_folder))


def test_default_sampling(checkpoint_folder: Path) -> None:
    settings = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
        "max_new_tokens": 2048,
    }
    others = {"do_sample": True, "pad_token_id": 3, "eos_token_id": 5, "top_k": 20, "typical_p": None}
    (checkpoint_folder / "generation_config.json").write_text(json.dumps(settings | others))
    assert resolve(str(checkpoint_folder)).default_sampling == settings


def test_no_default_sampling(checkpoint_folder: Path) -> None:
    assert resolve(str(checkpoint_folder)).default_sampling == {}
    (checkpoint_folder / "generation_config.json").write_text('{"temperature": null}')
    assert resolve(str(checkpoint_folder)).default_sampling == {}
    (checkpoint_folder / "generation_config.json").unlink()
    assert resolve(str(checkpoint_folder)).default_sampling == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "warm"),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("top_k", -2),
        ("min_p", True),
        ("repetition_penalty", 0.0),
        ("max_new_tokens", 0),
        ("max_new_tokens", [1]),
    ],
)
def test_wrong_default_sampling(checkpoint_folder: Path, key: str, value: object) -> None:
    path = checkpoint_folder / "generation_config.json"
    path.write_text(json.dumps({key: value}))
    with pytest.raises(CheckpointError, match=f"^{path}: {key}: .* must be ") as caught:
        resolve(str(checkpoint_folder))
    assert "\n" not in str(caught.value)


def test_dummy_weights_need_no_files(checkpoint_folder: Path) -> None:
    (checkpoint_folder / "model.safetensors").unlink()
    assert resolve(str(checkpoint_folder), load_format="dummy").vocab_size == 64
    (checkpoint_folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        resolve(str(checkpoint_folder), load_format="dummy")


def test_a_tokenizer_is_a_folder_of_its_own(checkpoint_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    with pytest.raises(CheckpointError, match=f"tokenizer '{folder}': {folder} has no tokenizer.json"):
        resolve_tokenizer(str(folder))
    (folder / "tokenizer.json").write_text("{}")
    assert resolve_tokenizer(str(folder)) == folder
    with pytest.raises(CheckpointError, match=r"tokenizer '.*tokenizer\.json' is a file; give the folder"):
        resolve_tokenizer(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"tokenizer './absent' "):
        resolve_tokenizer("./absent")


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_scaling": None}, 1000),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 500}}, 2000),
        ({"architectures": ["Gemma3ForCausalLM"], "rope_scaling": {"type": "linear", "factor": 8.0}}, 1000),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 250}}, 1000),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.5}}, 2500),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 1000),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, 1000),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e308}}, 1000),
        ({"rope_scaling": {"rope_type": "linear", "factor": 10**400}}, 1000),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10**400}}, 1000),
        ({"rope_scaling": {"rope_type": ["linear"], "factor": "2"}}, 1000),
        ({"rope_scaling": 3}, 1000),
    ],
)
def test_a_stretched_context(checkpoint_folder: Path, rope: dict[str, object], expected: int) -> None:
    """Invalid RoPE settings are ignored here; the device rejects them."""
    (checkpoint_folder / "config.json").write_text(json.dumps({"max_position_embeddings": 1000} | rope))
    assert resolve(str(checkpoint_folder)).max_position_embeddings == expected


@pytest.mark.parametrize("value", [None, 0, "64", True, 64.0, 10**400])
def test_wrong_size_in_the_config(checkpoint_folder: Path, value: object) -> None:
    (checkpoint_folder / "config.json").write_text(json.dumps({"vocab_size": value}))
    checkpoint = resolve(str(checkpoint_folder))
    with pytest.raises(CheckpointError, match=r"config.json: vocab_size is .* positive integer"):
        _ = checkpoint.vocab_size
    with pytest.raises(CheckpointError, match=r"config.json: max_position_embeddings is None"):
        _ = checkpoint.max_position_embeddings


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_folder_that_is_no_checkpoint(checkpoint_folder: Path, missing: str) -> None:
    (checkpoint_folder / missing).unlink()
    with pytest.raises(CheckpointError, match=f"has no .*{missing[-8:]}"):
        resolve(str(checkpoint_folder))


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./absent", "../absent", "~/absent/", "a/b/c", "", " ", "a\0b"]
)
def test_path_that_does_not_exist_is_not_looked_up_on_the_hub(model: str) -> None:
    with pytest.raises(CheckpointError, match=r"existing folder.*check the path") as caught:
        resolve(model, hub_endpoint="http://127.0.0.1:9")
    assert repr(model) in str(caught.value)


def test_file_instead_of_its_folder(checkpoint_folder: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        resolve(str(checkpoint_folder / "config.json"))


def test_revision_of_a_folder_is_refused(checkpoint_folder: Path) -> None:
    for model in (str(checkpoint_folder), "tiny"):
        with pytest.raises(CheckpointError, match="revision 'v1' is for hub names"):
            resolve(model, "v1")


def test_import_brings_neither_torch_nor_the_hub_client() -> None:
    assert imported_by("radixkv.checkpoints", ("torch", "huggingface_hub", "numpy")) == set()


def shard(checkpoint_folder: Path) -> None:
    """Splits the weights into two files with an index."""
    whole = checkpoint_folder / "model.safetensors"
    names = {name: f"model-0000{i}-of-00002.safetensors" for i, name in enumerate("ab", 1)}
    for name in names.values():
        shutil.copy(whole, checkpoint_folder / name)
    whole.unlink()
    index = {"metadata": {}, "weight_map": names}
    (checkpoint_folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("is_sharded", [False, True])
def test_weights_are_there_when_all_their_files_are(checkpoint_folder: Path, is_sharded: bool) -> None:
    if is_sharded:
        shard(checkpoint_folder)
    checkpoint = resolve(str(checkpoint_folder), load_format="dummy")
    assert checkpoint.has_weights
    next(checkpoint_folder.glob("*.safetensors")).unlink()
    assert not checkpoint.has_weights


@pytest.mark.parametrize(
    "index", ["{}", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": []}}']
)
def test_an_index_that_names_no_files_finds_no_weights(checkpoint_folder: Path, index: str) -> None:
    (checkpoint_folder / "model.safetensors.index.json").write_text(index)
    assert not resolve(str(checkpoint_folder), load_format="dummy").has_weights
