"""The embedded model: the same bytes everywhere, whole or not there, and loaded like any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from radixkv.checkpoints import recipe, resolve, tiny
from radixkv.errors import CheckpointError
from radixkv.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve("tiny", cache_folder=tmp_path_factory.mktemp("cache")).folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_have_the_recorded_digest(folder: Path) -> None:
    assert tiny.digest_of(contents(folder)) == tiny.DIGEST == tiny.digest_of(recipe.build_files())


def test_layout_is_a_llama_checkpoint(folder: Path) -> None:
    checkpoint = resolve(str(folder))
    weights = load_file(folder / "model.safetensors")
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.max_position_embeddings == 8192
    assert (
        weights["model.embed_tokens.weight"].shape
        == weights["lm_head.weight"].shape
        == (checkpoint.vocab_size, 256)
    )
    assert not np.array_equal(weights["model.embed_tokens.weight"], weights["lm_head.weight"])
    assert {weight.dtype for weight in weights.values()} == {np.dtype(np.float32)}
    assert 2_000_000 < sum(weight.size for weight in weights.values()) < 10_000_000


def test_tokenizer_fits_the_model(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    checkpoint = resolve(str(folder))
    assert tokenizer.vocab_size == checkpoint.vocab_size
    text = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n\n#### 72 \t日本語 🎉 naïve"
    ids = np.frombuffer(tokenizer.encode(text), dtype="<i4").tolist()
    assert ids[0] == checkpoint.config["bos_token_id"]
    assert tokenizer.decode(ids) == text
    end = Tokenizer.load(folder).encode(recipe.END_OF_TEXT + recipe.END_OF_TURN)
    assert set(np.frombuffer(end, dtype="<i4").tolist()[1:]) == checkpoint.eos_token_ids


def test_tokenizer_is_efficient_on_word_problems(folder: Path) -> None:
    text = (
        "Question: A baker makes 24 loaves of bread every morning. She sells half of them before noon and "
        "then a quarter of the remaining loaves in the afternoon. How many loaves does she have left at the end of "
        "the day?\nAnswer: Before noon she sells 24 / 2 = 12 loaves. In the afternoon she sells 12 / 4 = 3 loaves."
    )
    assert len(Tokenizer.load(folder).encode(text)) // 4 < len(text) / 3


def test_chat_template_opens_and_closes_every_turn(folder: Path) -> None:
    from transformers import AutoTokenizer

    rendered = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi "}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert rendered == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_no_sampling_defaults(folder: Path) -> None:
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings.keys() == {"bos_token_id", "eos_token_id"}


def test_second_call_builds_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "build_files", None)
    assert resolve("tiny", cache_folder=folder.parent).folder == folder


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "empty folder", "killed builder"])
def test_damaged_folder_is_built_again(tmp_path: Path, folder: Path, damage: str) -> None:
    copy = tmp_path / folder.name
    partial = tmp_path / f"{folder.name}.partial"
    if damage == "killed builder":
        partial.mkdir()
        (partial / "config.json").write_text("{")
    else:
        copy.mkdir()
        for name, content in contents(folder).items() if damage != "empty folder" else ():
            (copy / name).write_bytes(content)
    weights = copy / "model.safetensors"
    if damage == "flip":
        flipped = bytearray(weights.read_bytes())
        flipped[len(flipped) // 2] ^= 1
        weights.write_bytes(flipped)
    elif damage == "truncate":
        os.truncate(weights, 1000)
    elif damage == "remove":
        (copy / "tokenizer.json").unlink()
    assert contents(resolve("tiny", cache_folder=tmp_path).folder) == contents(folder)
    assert not partial.exists()


def test_new_recipe_has_a_folder_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(folder)
    monkeypatch.setattr(recipe, "SEED", 21)
    monkeypatch.setattr(tiny, "DIGEST", tiny.digest_of(recipe.build_files()))
    newer = resolve("tiny", cache_folder=folder.parent).folder
    assert newer != folder
    assert contents(newer)["model.safetensors"] != before["model.safetensors"]
    assert contents(folder) == before


def test_build_with_other_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "SEED", 21)
    with pytest.raises(CheckpointError, match=f"instead of {tiny.DIGEST}; reinstall"):
        resolve("tiny", cache_folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.lock"]


def test_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written into .*file/radixkv.*XDG_CACHE_HOME"):
        resolve("tiny", cache_folder=tmp_path / "file" / "radixkv")


def test_processes_that_race_get_one_good_folder(tmp_path: Path, folder: Path) -> None:
    code = (
        "import sys; from radixkv.checkpoints import resolve, tiny; print('ready', flush=True); sys.stdin.read(1);"
        "folder = resolve('tiny').folder;"
        "print(tiny.digest_of({path.name: path.read_bytes() for path in folder.iterdir()}), folder)"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(3)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("g")
        racer.stdin.flush()
    expected = tmp_path / "radixkv" / folder.name
    for racer in racers:
        output, _ = racer.communicate(timeout=60)
        assert racer.returncode == 0
        assert output == f"{tiny.DIGEST} {expected}\n"
    assert {path.name for path in expected.parent.iterdir()} == {folder.name, "tiny.lock"}
