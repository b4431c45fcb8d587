"""Tests of downloads with the real client, from a server that implements the hub's file API."""

from __future__ import annotations

import gc
import io
import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from radixkv.checkpoints import Checkpoint, resolve, resolve_tokenizer
from radixkv.errors import CheckpointError
from support.cases import rest_nightly


@pytest.fixture(autouse=True)
def no_user_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keeps the user's token from the test's server, and the user's settings from the test."""
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def served(hub: Any, checkpoint_files: dict[str, bytes]) -> Any:
    hub.repositories["org/model"] = checkpoint_files | {
        "pytorch_model.bin": b"a pickle",
        "consolidated.safetensors": b"the same weights again",
        "original/model.safetensors": b"and again",
        "README.md": b"words",
    }
    return hub


def test_downloads_config_tokenizer_and_safetensors_and_nothing_else(
    served: Any, tmp_path: Path, checkpoint_files: dict[str, bytes]
) -> None:
    checkpoint = resolve("org/model", cache_folder=tmp_path, hub_endpoint=served.endpoint)
    found = {path.name: path.read_bytes() for path in checkpoint.folder.rglob("*") if path.is_file()}
    assert found == checkpoint_files
    assert sorted(served.downloaded()) == sorted(checkpoint_files)
    assert checkpoint.name == "org/model"
    assert checkpoint.eos_token_ids == {2, 5, 7}
    assert checkpoint.vocab_size == 64


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


def test_a_tokenizer_is_its_files_and_no_others(served: Any, tmp_path: Path) -> None:
    served.repositories["org/model"] |= dict.fromkeys(TOKENIZER_FILES, b"{}")
    folder = resolve_tokenizer("org/model", "v1", cache_folder=tmp_path, hub_endpoint=served.endpoint)
    assert sorted(path.name for path in folder.iterdir()) == sorted(TOKENIZER_FILES)
    with pytest.raises(CheckpointError, match=r"^tokenizer 'org/absent': .*no such repository"):
        resolve_tokenizer("org/absent", cache_folder=tmp_path, hub_endpoint=served.endpoint)


def test_named_chat_templates_come_from_their_folder(served: Any, tmp_path: Path) -> None:
    named = {"additional_chat_templates/tool_use.jinja": b"tools", "other/tool_use.jinja": b"not this one"}
    served.repositories["org/model"] |= named
    folder = resolve_tokenizer("org/model", cache_folder=tmp_path, hub_endpoint=served.endpoint)
    assert [path.relative_to(folder).as_posix() for path in folder.rglob("tool_use.jinja")] == [*named][:1]


def test_a_model_brings_its_chat_template(served: Any, tmp_path: Path) -> None:
    served.repositories["org/model"] |= dict.fromkeys(TOKENIZER_FILES, b"{}")
    folder = resolve("org/model", cache_folder=tmp_path, hub_endpoint=served.endpoint).folder
    assert {path.name for path in folder.iterdir()} >= {*TOKENIZER_FILES, "generation_config.json"}


def test_settings_of_quantization_in_a_file_of_their_own(served: Any, tmp_path: Path) -> None:
    served.repositories["org/model"]["hf_quant_config.json"] = b'{"quantization": {"quant_algo": "FP8"}}'
    checkpoint = resolve("org/model", cache_folder=tmp_path, hub_endpoint=served.endpoint)
    section = {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}
    assert checkpoint.config["quantization_config"] == section


def test_dummy_weights_are_not_fetched(served: Any, tmp_path: Path) -> None:
    checkpoint = resolve("org/model", load_format="dummy", cache_folder=tmp_path, hub_endpoint=served.endpoint)
    assert checkpoint.vocab_size == 64
    assert sorted(served.downloaded()) == ["config.json", "generation_config.json", "tokenizer.json"]


def test_weights_are_missed_until_all_were_fetched(served: Any, tmp_path: Path) -> None:
    def resolve_without_weights() -> Checkpoint:
        return resolve("org/model", load_format="dummy", cache_folder=tmp_path, hub_endpoint=served.endpoint)

    files = served.repositories["org/model"]
    files["model-1.safetensors"] = files["model-2.safetensors"] = files.pop("model.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    assert not resolve_without_weights().has_weights
    whole = resolve("org/model", cache_folder=tmp_path, hub_endpoint=served.endpoint)
    assert whole.has_weights
    assert resolve_without_weights() == whole
    (whole.folder / "model-2.safetensors").unlink()
    assert not resolve_without_weights().has_weights


def test_second_call_fetches_no_file_again(served: Any, tmp_path: Path) -> None:
    first = resolve("org/model", cache_folder=tmp_path, hub_endpoint=served.endpoint)
    served.requests.clear()
    assert resolve("org/model", cache_folder=tmp_path, hub_endpoint=served.endpoint) == first
    assert served.downloaded() == []


def test_cached_copy_serves_when_the_hub_is_down(served: Any, tmp_path: Path) -> None:
    first = resolve("org/model", cache_folder=tmp_path, hub_endpoint=served.endpoint)
    served.error_response = (503, {})
    assert resolve("org/model", cache_folder=tmp_path, hub_endpoint=served.endpoint) == first


def test_named_revision_is_asked_for(served: Any, tmp_path: Path) -> None:
    resolve("org/model", "v1", cache_folder=tmp_path, hub_endpoint=served.endpoint)
    assert ("GET", "/api/models/org/model/revision/v1") in served.requests


@pytest.mark.parametrize("is_terminal", rest_nightly([False, True], kept=(1,)))
def test_the_client_draws_no_progress_bar(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(written, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setattr(sys, "stdout", written)
    gc.disable()  # the client leaves its bars to the collector, and tqdm moves the later ones of 20 on the screen
    try:
        for number in range(12):
            resolve("org/model", cache_folder=tmp_path / str(number), hub_endpoint=served.endpoint)
    finally:
        gc.enable()
    gc.collect()
    assert written.getvalue() == ""


def test_the_downloaded_bytes_are_shown_until_the_end(served: Any, tmp_path: Path) -> None:
    served.repositories["org/model"]["model.safetensors"] = bytes(25_000_000)
    shown: list[str] = []
    resolve("org/model", cache_folder=tmp_path, hub_endpoint=served.endpoint, show_download=shown.append)
    *during, whole, end = shown
    assert all(re.fullmatch(r"downloaded 0\.0[0-3] of 0\.0[0-3] GB", text) for text in during)
    assert (whole, end) == ("downloaded 0.03 of 0.03 GB", "")


@pytest.mark.parametrize(
    ("model", "revision", "error_response", "reason"),
    [
        ("org/absent", None, None, "no such repository"),
        ("org/model", "v9", None, "no revision 'v9'"),
        (
            "org/model",
            None,
            (401, {"X-Error-Code": "RepoNotFound"}),
            "no such repository.*HF_TOKEN",
        ),
        ("org/model", None, (401, {}), "refuses access; set HF_TOKEN"),
        ("org/model", None, (403, {"X-Error-Code": "GatedRepo"}), "gated.*HF_TOKEN"),
        ("org/model", None, (418, {}), "no copy is cached.*418"),
        ("org/a--b", None, None, "hub name"),
    ],
)
def test_refusal_is_one_line_that_says_what_to_do(
    served: Any,
    tmp_path: Path,
    model: str,
    revision: str | None,
    error_response: tuple[int, dict[str, str]] | None,
    reason: str,
) -> None:
    served.error_response = error_response
    with pytest.raises(CheckpointError, match=reason) as caught:
        resolve(model, revision, cache_folder=tmp_path, hub_endpoint=served.endpoint)
    assert model in str(caught.value)
    assert "\n" not in str(caught.value)


def test_listed_file_that_is_not_there(served: Any, tmp_path: Path) -> None:
    served.missing_files.add("config.json")
    with pytest.raises(CheckpointError, match=r"'org/model': the download failed: .*; try again") as caught:
        resolve("org/model", cache_folder=tmp_path, hub_endpoint=served.endpoint)
    assert "\n" not in str(caught.value)


def test_no_network(tmp_path: Path) -> None:
    with socket.socket() as closed_port:
        closed_port.bind(("127.0.0.1", 0))  # reserves a port on which nothing listens
        endpoint = f"http://127.0.0.1:{closed_port.getsockname()[1]}"
        with pytest.raises(CheckpointError, match=r"no copy is cached.*check the network"):
            resolve("org/model", cache_folder=tmp_path, hub_endpoint=endpoint)


def test_repository_without_safetensors(served: Any, tmp_path: Path) -> None:
    del served.repositories["org/model"]["model.safetensors"]
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors files"):
        resolve("org/model", cache_folder=tmp_path, hub_endpoint=served.endpoint)
