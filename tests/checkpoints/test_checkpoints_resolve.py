"""What a model's name stands for, and what is said when it stands for nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from radixkv.checkpoints import resolve
from radixkv.errors import CheckpointError


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
        ({"eos_token_id": [5, 7]}, 2, {5, 7}),
        ({"eos_token_id": 0}, 2, {0}),
        ({}, 2, {2}),
        ({"eos_token_id": None}, [2, 3], {2, 3}),
        (None, 2, {2}),
        (None, None, set()),
    ],
)
def test_end_of_sequence_ids_come_from_the_generation_config_first(
    checkpoint_folder: Path,
    generation_config: dict[str, object] | None,
    eos_token_id: object,
    expected: set[int],
) -> None:
    if generation_config is None:
        (checkpoint_folder / "generation_config.json").unlink()
    else:
        (checkpoint_folder / "generation_config.json").write_text(json.dumps(generation_config))
    (checkpoint_folder / "config.json").write_text(json.dumps({"eos_token_id": eos_token_id}))
    assert resolve(str(checkpoint_folder)).eos_token_ids == expected


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b'{"vocab_size": ', b"\xff\xfe", b"[1]", b"", b"[" * 100_000])
def test_corrupt_json_is_one_line(checkpoint_folder: Path, name: str, content: bytes) -> None:
    (checkpoint_folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} .*fetch the checkpoint again") as caught:
        resolve(str(checkpoint_folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["2", 2.0, True, -1, [2, None]])
def test_wrong_end_of_sequence_id(checkpoint_folder: Path, value: object) -> None:
    (checkpoint_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id is .*token id"):
        resolve(str(checkpoint_folder))


@pytest.mark.parametrize("value", [None, 0, "64", True, 64.0])
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
    with pytest.raises(CheckpointError, match=r"is not a folder that exists.*check the path") as caught:
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
    code = "import sys, radixkv.checkpoints; print({'torch', 'huggingface_hub', 'numpy'} & sys.modules.keys())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert output.stdout == "set()\n"
