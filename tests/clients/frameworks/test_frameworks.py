"""Tests with frameworks for agents and evaluations, in large environments. ``make test-clients`` runs them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixkv.checkpoints.embedded import embedded_folder
from support.client_scripts import KEY, run_scripts
from support.live import LiveServer, serving

FOLDER = Path(__file__).parent

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose model calls tools."""
    flags = ("--served-model-name", "embedded", "--max-total-tokens", "16384", "--grammar-backend", "xgrammar")
    with serving(embedded_folder(), tmp_path_factory.mktemp("s") / "errors", *flags, key=KEY) as live:
        yield live


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the embedded model with a context in which the instructions of Codex have room."""
    folder = tmp_path_factory.mktemp("wide") / "embedded"
    shutil.copytree(embedded_folder(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 65536}))
    return folder


@pytest.fixture(scope="module")
def wide_server(wide_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    flags = ("--served-model-name", "embedded", "--max-total-tokens", "65536", "--grammar-backend", "xgrammar")
    with serving(wide_model, tmp_path_factory.mktemp("w") / "errors", *flags, key=KEY) as live:
        yield live


@pytest.mark.parametrize(
    ("packages", "script"),
    [
        ("agents", "by_openai_agents.py"),
        ("agents", "by_pydantic_ai.py"),
        ("agents", "by_smolagents.py"),
        ("langchain", "by_langchain_agents.py"),
        ("langchain", "by_litellm_tools.py"),
        ("langchain", "../tools_by_openai.py"),
        ("llama-index", "by_instructor.py"),
        ("llama-index", "by_llama_index.py"),
        ("lm-eval", "by_lm_eval.py"),
        ("inspect", "by_inspect_ai.py"),
        ("command-lines", "by_claude_code.py"),
    ],
)
def test_a_framework(server: LiveServer, packages: str, script: str, tmp_path: Path) -> None:
    run_scripts(server, embedded_folder(), f"frameworks/{packages}", [FOLDER / script], tmp_path)


def test_codex(wide_server: LiveServer, wide_model: Path, tmp_path: Path) -> None:
    run_scripts(wide_server, wide_model, "frameworks/command-lines", [FOLDER / "by_codex.py"], tmp_path)
