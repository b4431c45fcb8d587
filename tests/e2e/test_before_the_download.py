"""What machine, settings and small files already rule out ends before weights are fetched from the hub."""

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
from support.failed_start import reason_to_end
from support.hub import Hub, serving_hub
from support.live import serving

WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub of every process that is started, with ``org/model``; nothing is cached, and nobody is known."""
    save_llama(tmp_path / "model")
    for name in ("HF_TOKEN", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with serving_hub() as hub:
        hub.repositories["org/model"] = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        # This process's client has read its environment already.
        here = partial(resolve, cache_folder=tmp_path / "home" / "hub", hub_endpoint=hub.endpoint)
        monkeypatch.setattr("radixkv.llm.llm.resolve", here)
        yield hub


def test_a_server_ends_before_it_fetches_weights(hub: Hub, tmp_path: Path) -> None:
    (scratch := tmp_path / "t").mkdir()
    assert "set device to cpu" in reason_to_end(scratch, "org/model", "--device", "cuda")
    assert WEIGHTS not in hub.fetched()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"device": "cuda"}, "set device to cpu"),
        ({"device": "cpu", "dtype": "float16"}, "dtype 'float16'"),
        ({"device": "cpu", "max_model_len": 2000}, "max_model_len 2000"),
        ({"device": "cpu", "gpu_memory_utilization": 0.5}, "gpu_memory_utilization"),
        ({"device": "cpu", "max_total_tokens": 1 << 45}, "max_total_tokens"),
    ],
)
def test_an_engine_ends_before_it_fetches_weights(hub: Hub, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM("org/model", **settings)
    assert WEIGHTS not in hub.fetched()


def test_a_wrong_template_or_tokenizer_ends_a_server_before_it_fetches_weights(hub: Hub, tmp_path: Path) -> None:
    (scratch := tmp_path / "t").mkdir()
    (template := tmp_path / "broken.jinja").write_text("{% if %}")
    assert "is not a chat template" in reason_to_end(scratch, "org/model", "--chat-template", str(template))
    assert WEIGHTS not in hub.fetched()
    assert "no-such" in reason_to_end(scratch, "org/other", "--tokenizer", str(tmp_path / "no-such"))
    assert WEIGHTS not in hub.fetched()


@pytest.mark.parametrize("setting", ["chat_template", "tokenizer"])
def test_a_wrong_template_or_tokenizer_ends_an_engine_before_it_fetches_weights(
    hub: Hub, tmp_path: Path, setting: str
) -> None:
    with pytest.raises(CheckpointError, match="no-such"):
        LLM("org/model", device="cpu", **{setting: str(tmp_path / "no-such")})
    assert WEIGHTS not in hub.fetched()


def test_an_architecture_that_is_not_built_is_not_fetched(hub: Hub) -> None:
    files = hub.repositories["org/model"]
    files["config.json"] = files["config.json"].replace(b"LlamaForCausalLM", b"MambaForCausalLM")
    with pytest.raises(CheckpointError, match="'MambaForCausalLM' is not supported"):
        LLM("org/model", device="cpu")
    assert WEIGHTS not in hub.fetched()


def test_what_fits_is_fetched_and_served_and_not_looked_at_again(hub: Hub, tmp_path: Path) -> None:
    with serving(Path("org/model"), tmp_path / "errors", "--device", "cpu") as live:
        assert len(live.complete(prompt=[1, 2, 3], max_tokens=2, return_token_ids=True)["choices"]) == 1
    assert hub.fetched().count(WEIGHTS) == 1
    said = (tmp_path / "errors").read_text()
    assert said.index("checking that machine") < said.index("getting the weights of org/model")
    llm = LLM("org/model", device="cpu")
    llm.shutdown()
    assert hub.fetched().count(WEIGHTS) == 1
