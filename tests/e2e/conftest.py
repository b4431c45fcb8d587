from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from support.live import HERE, LiveServer, serving, wait_for, watched

SMALL = ("--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--max-queued-requests", "32")


@pytest.fixture(scope="session")
def plain_server(sensitive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(sensitive, tmp_path_factory.mktemp("s") / "errors") as live:
        yield live


@pytest.fixture(scope="module")
def server(plain_server: LiveServer) -> LiveServer:
    """A server with the usual settings, which starts a module's tests with an empty cache."""
    plain_server.flush_cache()
    return plain_server


@pytest.fixture
def exact_and_idle_afterwards(server: LiveServer) -> Iterator[None]:
    before = server.canary()
    yield
    wait_for(server.is_idle, "pages or requests are left")
    assert server.canary() == before


@pytest.fixture
def start(sensitive: Path, tmp_path: Path) -> Callable[..., AbstractContextManager[LiveServer]]:
    return lambda *flags: serving(sensitive, tmp_path / "errors", *flags)


@pytest.fixture
def start_without_timeouts(sensitive: Path, tmp_path: Path) -> Callable[..., AbstractContextManager[LiveServer]]:
    """Starts servers whose timeouts never expire in a test."""
    entry = [sys.executable, str(HERE / "patient_cli.py")]
    return lambda *flags: serving(sensitive, tmp_path / "errors", *flags, entry=entry)


@pytest.fixture(scope="session")
def watched_server(sensitive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with watched(sensitive, tmp_path_factory.mktemp("s") / "errors", *SMALL) as live:
        yield live


@pytest.fixture(scope="session")
def idle_state(watched_server: LiveServer) -> tuple[list[int], dict[str, object]]:
    """The server's canary answer, and its leftovers while it is idle."""
    return watched_server.canary(), watched_server.leftovers_at_rest()


@pytest.fixture(scope="module")
def shared_server(watched_server: LiveServer) -> LiveServer:
    """A server that starts a module's tests with an empty cache; they use it through ``checked_server``."""
    watched_server.flush_cache()
    return watched_server


@pytest.fixture
def checked_server(
    shared_server: LiveServer, idle_state: tuple[list[int], dict[str, object]]
) -> Iterator[LiveServer]:
    """The shared server; checks afterwards that the test left nothing and that answers are unchanged."""
    canary, leftovers = idle_state
    yield shared_server
    wait_for(shared_server.is_idle, "pages or requests are left")
    assert shared_server.canary() == canary
    with contextlib.suppress(AssertionError):
        wait_for(lambda: shared_server.leftovers_at_rest() == leftovers, "something is left", 30)
    assert shared_server.leftovers_at_rest() == leftovers
