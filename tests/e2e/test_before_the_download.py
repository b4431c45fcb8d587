"""Starts that machine, settings or small files rule out end before weights are downloaded from the hub."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from radixkv import LLM
from radixkv.checkpoints import resolve
from radixkv.errors import CheckpointError, ConfigError
from support.checkpoints import save_llama
from support.failed_start import failed_start_error
from support.hub import Hub, run_hub
from support.live import serving

WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A local hub with ``org/model`` for every started process, with an empty cache and no login."""
    save_llama(tmp_path / "model")
    for name in ("HF_TOKEN", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with run_hub() as hub:
        hub.repositories["org/model"] = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        # The hub client of this process has already read its environment.
        here = partial(resolve, cache_folder=tmp_path / "home" / "hub", hub_endpoint=hub.endpoint)
        monkeypatch.setattr("radixkv.llm.llm.resolve", here)
        yield hub


@pytest.mark.nightly
def test_a_server_fails_before_it_downloads_weights(hub: Hub, tmp_path: Path) -> None:
    (scratch := tmp_path / "t").mkdir()
    assert "device to cpu" in failed_start_error(scratch, "org/model", "--device", "cuda")
    assert WEIGHTS not in hub.downloaded()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"device": "cuda"}, ConfigError, "device to cpu"),
        ({"device": "cpu", "dtype": "float16"}, ConfigError, "dtype 'float16'"),
        ({"device": "cpu", "max_model_len": 2000}, ConfigError, "max_model_len 2000"),
        ({"device": "cpu", "max_total_tokens": 1 << 45}, ConfigError, "max_total_tokens"),
        ({"device": "cpu", "chat_template": "/no-such"}, CheckpointError, "no-such"),
        ({"device": "cpu", "tokenizer": "/no-such"}, CheckpointError, "no-such"),
    ],
)
def test_an_engine_fails_before_it_downloads_weights(
    hub: Hub, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM("org/model", **settings)
    assert WEIGHTS not in hub.downloaded()


@pytest.mark.nightly
def test_a_wrong_template_or_tokenizer_fails_a_server_before_the_download(hub: Hub, tmp_path: Path) -> None:
    (scratch := tmp_path / "t").mkdir()
    (template := tmp_path / "broken.jinja").write_text("{% if %}")
    assert "chat template" in failed_start_error(scratch, "org/model", "--chat-template", str(template))
    assert WEIGHTS not in hub.downloaded()
    assert "no-such" in failed_start_error(scratch, "org/other", "--tokenizer", str(tmp_path / "no-such"))
    assert WEIGHTS not in hub.downloaded()


def test_an_unsupported_architecture_is_not_downloaded(hub: Hub) -> None:
    files = hub.repositories["org/model"]
    files["config.json"] = files["config.json"].replace(b"LlamaForCausalLM", b"MambaForCausalLM")
    with pytest.raises(CheckpointError, match="'MambaForCausalLM'"):
        LLM("org/model", device="cpu")
    assert WEIGHTS not in hub.downloaded()


@pytest.mark.nightly
def test_a_model_that_fits_is_downloaded_once_and_served(hub: Hub, tmp_path: Path) -> None:
    with serving(Path("org/model"), tmp_path / "errors", "--device", "cpu") as live:
        assert len(live.complete(prompt=[1, 2, 3], max_tokens=2, return_token_ids=True)["choices"]) == 1
    assert hub.downloaded().count(WEIGHTS) == 1
    log = (tmp_path / "errors").read_text()
    assert log.index("checking that machine") < log.index("getting the weights of org/model")
    llm = LLM("org/model", device="cpu")
    llm.shutdown()
    assert hub.downloaded().count(WEIGHTS) == 1


def test_an_engine_shows_the_download(hub: Hub) -> None:
    shown: list[str] = []
    llm = LLM("org/model", device="cpu", show_download=shown.append)
    llm.shutdown()
    assert shown.count("") == 2  # small files first, then the weights
    assert all(text.startswith("downloaded ") for text in shown if text)
    assert len(shown) > 3
