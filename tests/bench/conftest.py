import pytest
from fake_openai import FakeServer


@pytest.fixture
def fake():
    with FakeServer() as server:
        yield server
