"""Tests with real client libraries. Each script runs in a virtual environment that the Makefile creates."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from support.live import LiveServer, serving, wait_for

FOLDER = Path(__file__).parent
ENVIRONMENTS = Path(sys.prefix) / "clients"
NOWHERE = "http://127.0.0.1:9"
"""A proxy that does not exist, so that requests to other hosts fail."""
KEY = "sk-of-the-tests"


@pytest.fixture(scope="module")
def server(sensitive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose queue is too short for a large batch."""
    flags = ("--served-model-name", "embedded", "--max-num-seqs", "8", "--max-queued-requests", "24")
    flags += ("--grammar-backend", "xgrammar")
    with serving(sensitive, tmp_path_factory.mktemp("s") / "errors", *flags, key=KEY) as live:
        yield live


OPENAI = ("completions_by_openai.py", "chat_by_openai.py", "responses_by_openai.py")


@pytest.mark.parametrize(
    ("packages", "scripts"),
    [
        ("openai-2", OPENAI),
        ("openai-3", OPENAI),
        ("anthropic-2", ["by_anthropic.py"]),
        ("openai-2", ["by_litellm.py"]),
        ("openai-2", ["by_langchain.py"]),
    ],
)
def test_a_client(server: LiveServer, packages: str, scripts: Sequence[str]) -> None:
    python = ENVIRONMENTS / packages / "bin" / "python"
    assert python.exists(), f"there is no {python}; run make {ENVIRONMENTS / packages / '.ready'}"
    before = server.canary()
    ended = subprocess.run(
        [python, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", FOLDER, "--noconftest"]
        + [str(FOLDER / script) for script in scripts],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            "PATH": os.environ["PATH"],
            "SERVER": server.base_url,
            "KEY": KEY,
            "CLIENT": packages,
            "HTTP_PROXY": NOWHERE,
            "HTTPS_PROXY": NOWHERE,
            "NO_PROXY": "127.0.0.1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LANGSMITH_TRACING": "false",
        },
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    wait_for(server.is_idle, "pages or requests are left")
    assert server.canary() == before
