from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.scripted_server import ScriptedServer


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server
