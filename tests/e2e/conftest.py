from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from support.live import HERE, Live, serving, wait_for, watched

SMALL = ("--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--max-queued-requests", "32")


@pytest.fixture(scope="module")
def server(sensitive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(sensitive, tmp_path_factory.mktemp("s") / "errors") as live:
        yield live


@pytest.fixture
def start(sensitive: Path, tmp_path: Path) -> Callable[..., AbstractContextManager[Live]]:
    return lambda *flags: serving(sensitive, tmp_path / "errors", *flags)


@pytest.fixture
def start_patient(sensitive: Path, tmp_path: Path) -> Callable[..., AbstractContextManager[Live]]:
    """Servers that give up nothing because of the time."""
    entry = [sys.executable, str(HERE / "patient_cli.py")]
    return lambda *flags: serving(sensitive, tmp_path / "errors", *flags, entry=entry)


@pytest.fixture(scope="module")
def sturdy(sensitive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server to break; see ``unharmed``."""
    with watched(sensitive, tmp_path_factory.mktemp("s") / "errors", *SMALL) as live:
        yield live


@pytest.fixture(scope="module")
def at_rest(sturdy: Live) -> tuple[list[int], dict[str, object]]:
    """What its canary says, and what there is in both processes while nothing is asked."""
    return sturdy.canary(), sturdy.remains_at_rest()


@pytest.fixture
def unharmed(sturdy: Live, at_rest: tuple[list[int], dict[str, object]]) -> Iterator[Live]:
    """The same server; afterwards nothing of the test is left in it, and its answers are what they were."""
    canary, remains = at_rest
    yield sturdy
    wait_for(sturdy.is_idle, "pages or requests are left")
    assert sturdy.canary() == canary
    with contextlib.suppress(AssertionError):
        wait_for(lambda: sturdy.remains_at_rest() == remains, "something is left", 30)
    assert sturdy.remains_at_rest() == remains
