from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import pytest

from support.fake_openai import FakeServer
from support.quick_opening import opens_quickly as opens_quickly


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Returns a function that gives commands a text on standard input."""
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))
