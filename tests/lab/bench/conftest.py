import pytest

from radixkv.cli import main
from support.fake_openai import FakeServer


@pytest.fixture
def fake():
    with FakeServer() as server:
        yield server


@pytest.fixture
def inside(capsys):
    """Runs the command in this process, which is faster; returns exit code, standard output and standard error."""

    def run(*flags):
        try:
            code = main(["bench", *map(str, flags)])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run
