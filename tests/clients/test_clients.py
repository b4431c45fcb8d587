"""Tests with real client libraries. Each script runs in a virtual environment that the Makefile creates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from radixkv.checkpoints.embedded import embedded_folder
from support.checkpoints import save_checkpoint
from support.client_scripts import KEY, run_scripts
from support.live import LiveServer, serving
from support.small_tokenizers import with_yes_and_no

FOLDER = Path(__file__).parent
NAME = ("--served-model-name", "embedded")


@pytest.fixture(scope="module")
def server(sensitive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose queue is too short for a large batch."""
    flags = (*NAME, "--max-num-seqs", "8", "--max-queued-requests", "24")
    with serving(sensitive, tmp_path_factory.mktemp("s") / "errors", *flags, key=KEY) as live:
        yield live


@pytest.fixture(scope="module")
def agent_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose model calls tools."""
    flags = (*NAME, "--grammar-backend", "xgrammar")
    with serving(embedded_folder(), tmp_path_factory.mktemp("a") / "errors", *flags, key=KEY) as live:
        yield live


@pytest.fixture(scope="module")
def diagnosing_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with a tenant, whose model has two names and calls tools."""
    folder = tmp_path_factory.mktemp("d")
    (folder / "tenants.toml").write_text('[[tenants]]\nname = "one"\nkeys = ["sk-of-a-tenant"]\n')
    flags = (*NAME, "another", "--grammar-backend", "xgrammar", "--tenants", str(folder / "tenants.toml"))
    with serving(embedded_folder(), folder / "errors", *flags, key=KEY) as live:
        yield live


OPENAI = ("completions_by_openai.py", "chat_by_openai.py", "responses_by_openai.py")


@pytest.mark.parametrize(
    ("packages", "scripts"),
    [
        ("openai-3", OPENAI),
        ("anthropic-2", ["by_anthropic.py"]),
        pytest.param("openai-2", OPENAI, marks=pytest.mark.nightly),
        pytest.param("openai-2", ["by_litellm.py"], marks=pytest.mark.nightly),
        pytest.param("openai-2", ["by_langchain.py"], marks=pytest.mark.nightly),
    ],
)
def test_a_client(
    server: LiveServer, sensitive: Path, packages: str, scripts: Sequence[str], tmp_path: Path
) -> None:
    run_scripts(server, sensitive, packages, [FOLDER / script for script in scripts], tmp_path)


@pytest.mark.parametrize("marks", ["not nightly", pytest.param("nightly", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("packages", "script"), [("openai-3", "tools_by_openai.py"), ("anthropic-2", "tools_by_anthropic.py")]
)
def test_tools_of_a_client(
    agent_server: LiveServer, packages: str, script: str, marks: str, tmp_path: Path
) -> None:
    run_scripts(agent_server, embedded_folder(), packages, [FOLDER / script], tmp_path, marks)


@pytest.mark.parametrize(
    ("packages", "script"),
    [("openai-3", "diagnostics_by_openai.py"), ("anthropic-2", "diagnostics_by_anthropic.py")],
)
@pytest.mark.nightly
def test_diagnostics_of_a_client(diagnosing_server: LiveServer, packages: str, script: str, tmp_path: Path) -> None:
    scripts, marks = [FOLDER / script], "nightly or not nightly"
    run_scripts(diagnosing_server, embedded_folder(), packages, scripts, tmp_path, marks)


def canary_of_embeddings(server: LiveServer) -> object:
    return server.http.post("/v1/embeddings", json={"input": [5, 6, 7]}).json()["data"]


@pytest.mark.parametrize("packages", ["openai-3", pytest.param("openai-2", marks=pytest.mark.nightly)])
def test_embeddings_of_a_client(sensitive: Path, packages: str, tmp_path: Path) -> None:
    with serving(sensitive, tmp_path / "errors", *NAME, "--task", "embed", key=KEY) as server:
        scripts = [FOLDER / "embeddings_by_openai.py"]
        run_scripts(server, sensitive, packages, scripts, tmp_path, canary=canary_of_embeddings)


def canary_of_scores(server: LiveServer) -> object:
    return server.http.post("/v1/score", json={"text_1": "a", "text_2": "b"}).json()["data"]


@pytest.mark.nightly
def test_reranking_of_a_client(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    folder = tmp_path_factory.mktemp("reranker")
    tokenizer = with_yes_and_no()
    tokenizer.save(str(folder / "tokenizer.json"))
    save_checkpoint(folder, model_type="qwen3", vocab_size=tokenizer.get_vocab_size())
    flags = ("--task", "score", "--max-model-len", "1024", "--max-total-tokens", "8192")
    with serving(folder, tmp_path / "errors", *NAME, *flags, key=KEY) as server:
        scripts = [FOLDER / "rerank_by_cohere.py"]
        run_scripts(server, folder, "cohere-7", scripts, tmp_path, canary=canary_of_scores)
