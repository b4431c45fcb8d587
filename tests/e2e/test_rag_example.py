"""The example of examples/rag against real servers: what its table says, and errors of a line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pytest

from radixkv.checkpoints import resolve
from support.live import LIMIT_S, LiveServer, serving
from support.paths import ROOT
from support.split_router import routing

FOLDER = ROOT / "examples" / "rag"


class Servers(NamedTuple):
    """The servers of the example: the one that answers is the decode server of the split, too."""

    decode: LiveServer
    embeddings: LiveServer
    reranker: LiveServer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what the servers write; ``kv`` in it is the store of the split."""
    return tmp_path_factory.mktemp("rag")


def starting(folder: Path, name: str, *flags: str, model: Path | None = None) -> AbstractContextManager[LiveServer]:
    (folder / name).mkdir()
    return serving(model or resolve("tiny").folder, folder / name / "errors", *flags)


def stored(folder: Path) -> tuple[str, ...]:
    """Returns the flags of servers that share a store."""
    return ("--host-memory", "64MiB", "--load-policy", "always", "--cache-url", f"file://{folder}/kv")


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[Servers]:
    reranker = ("--task", "score", "--load-format", "dummy")
    with (
        starting(folder, "decode", *stored(folder)) as decode,
        starting(folder, "embeddings", "--task", "embed") as embeddings,
        starting(folder, "reranker", *reranker, model=FOLDER / "reranker") as scores,
    ):
        yield Servers(decode, embeddings, scores)


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "rag.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)


def table(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    """Returns the cells of each row by the names of the columns."""
    assert (done.returncode, done.stderr) == (0, "")
    head, *rows = done.stdout.split("\n\n", 1)[1].splitlines()
    names = head.replace(" %", "%").split()
    return {row.split()[0]: dict(zip(names, row.split(), strict=True)) for row in rows}


@pytest.mark.nightly
def test_documents_in_a_fixed_order_share_more(servers: Servers) -> None:
    done = run("--url", servers.decode.base_url, "--num-questions", "8", "--orders", "found", "id")
    assert "24 documents, 4 in a prompt; the one with the answer is among them for 8 of 8 questions" in done.stdout
    rows = table(done)
    assert 0 < int(rows["found"]["cached"]) < int(rows["id"]["cached"])
    for row in rows.values():
        assert int(row["right"].split("/")[0]) >= 6  # the documents reach the model whole
        assert float(row["repeated%"]) > float(row["cached%"])


@pytest.mark.nightly
def test_embeddings_and_reranks_come_from_servers_of_their_own(servers: Servers) -> None:
    flags = ("--embeddings", servers.embeddings.base_url, "--reranker", servers.reranker.base_url)
    (row,) = table(run("--url", servers.decode.base_url, *flags, "--num-questions", "2", "--orders", "id")).values()
    assert int(row["prompt"]) > 300
    assert servers.embeddings.metric("prompt_tokens_total") > 24 * 64
    assert servers.reranker.metric("prompt_tokens_total") > 2 * 4 * 64


@pytest.mark.nightly
def test_the_decode_server_of_a_split_finds_what_the_other_one_has_computed(folder: Path, servers: Servers) -> None:
    with (
        starting(folder, "prefill", *stored(folder)) as prefill,
        routing(prefill.base_url, servers.decode.base_url) as router,
    ):
        done = run("--url", str(router.base_url), "--num-questions", "3", "--orders", "id")
        assert prefill.metric("prompt_tokens_total") > 0
    (row,) = table(done).values()
    assert int(row["storage"]) > 64
    assert int(row["computed"]) <= 64


@pytest.mark.nightly
@pytest.mark.parametrize("role", ["embeddings", "reranker"])
def test_a_server_of_another_task_is_named_in_a_line(servers: Servers, role: str) -> None:
    url = servers.decode.base_url
    done = run("--url", url, f"--{role}", url)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert url in line
    assert ("--task embed" if role == "embeddings" else "--task score") in line


def test_a_server_that_is_not_there_is_named_in_a_line() -> None:
    done = run("--url", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr == "rag.py: error: the server http://127.0.0.1:1: [Errno 111] Connection refused\n"


def test_a_bad_line_of_the_questions_is_named_in_a_line(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "Why?", "answer": "so", "document": "a-1"}\n{"question": "Why?"}\n')
    done = run("--questions", str(questions))
    assert done.returncode == 1
    assert done.stderr.startswith(f"rag.py: error: {questions}:2: ")
    assert done.stderr.count("\n") == 1
