from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from live import Live, serving


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model is built here once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def server(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(cache, tmp_path_factory.mktemp("s") / "errors") as live:
        yield live


@pytest.fixture
def start(cache: Path, tmp_path: Path) -> Callable[..., AbstractContextManager[Live]]:
    return lambda *flags: serving(cache, tmp_path / "errors", *flags)
