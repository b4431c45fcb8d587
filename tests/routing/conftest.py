"""Servers and the environment of the routers, which ``make test-routing`` makes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from radixkv.checkpoints.embedded import embedded_folder
from support.live import LiveServer, serving
from support.paths import ROOT
from support.routed_load import Load

POOL_TOKENS = 6500
"""Of each server: enough for two thirds of the conversations of the load."""
Start = Callable[[int], LiveServer]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--environment",
        metavar="FOLDER",
        default=str(ROOT / ".venv" / "routing"),
        help="virtual environment with the packages of tests/routing/requirements.txt",
    )


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> Path:
    """The folder of the routers' programs."""
    folder = Path(request.config.getoption("--environment")) / "bin"
    assert folder.is_dir(), f"{folder} is absent; make test-routing makes it"
    return folder


@pytest.fixture(scope="session")
def load() -> Load:
    return Load(n_sessions=13, n_turns=5)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers with a pool of so many tokens."""
    with ExitStack() as stack:

        def run(n_tokens: int = POOL_TOKENS) -> LiveServer:
            errors = tmp_path / f"{len(os.listdir(tmp_path))}.log"
            flags = ("--served-model-name", "tiny", "--max-total-tokens", str(n_tokens))
            return stack.enter_context(serving(embedded_folder(), errors, *flags))

        yield run
