from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.fake_openai import FakeServer


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server
