"""Runs scripts of tests in the environment of a client library, which the Makefile creates."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from support.live import LiveServer, wait_for

KEY = "sk-of-the-tests"
"""The API key of the servers."""
ENVIRONMENTS = Path(sys.prefix) / "clients"
NOWHERE = "http://127.0.0.1:9"
"""A proxy that does not exist, so that requests to other hosts fail."""
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}
"""Settings with which the libraries ask no other host for anything."""
LIMIT_S = 300
"""Timeout of a run."""


def run_scripts(
    server: LiveServer,
    model: Path,
    environment: str,
    scripts: Sequence[Path],
    folder: Path,
    marks: str = "not nightly",
    canary: Callable[[LiveServer], object] = LiveServer.canary,
) -> None:
    """Runs scripts against a server, which must be as before afterwards.

    Args:
        server: the server, whose API key is ``KEY``.
        model: the folder of its checkpoint.
        environment: the list of packages, as a path below ``tests/clients`` without its suffix.
        scripts: files with tests.
        folder: an empty folder for what the libraries write.
        marks: which of the tests to run, as pytest's ``-m``.
        canary: returns what the server must answer before and afterwards.
    """
    python = ENVIRONMENTS / environment / "bin" / "python"
    assert python.exists(), f"there is no {python}; run make {ENVIRONMENTS / environment / '.ready'}"
    before = canary(server)
    ended = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder]
        + ["--noconftest", "-o", "markers=nightly", "-m", marks, *scripts],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "HOME": str(folder),
            "SERVER": server.base_url,
            "KEY": KEY,
            "MODEL": str(model),
            "CLIENT": environment,
            "HTTP_PROXY": NOWHERE,
            "HTTPS_PROXY": NOWHERE,
            "NO_PROXY": "127.0.0.1",
            **QUIET,
        },
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    wait_for(server.is_idle, "pages or requests are left")
    assert canary(server) == before
