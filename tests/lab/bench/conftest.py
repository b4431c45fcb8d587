import gc

import pytest

from radixkv.cli import main
from support.fake_openai import FakeServer
from support.json_lines import read_lines


@pytest.fixture(autouse=True)
def counts_no_objects(monkeypatch):
    """Spares each load a count of the tests' frozen objects, which takes longer than most loads."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)


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


@pytest.fixture
def completed(fake, tmp_path, inside):
    """Runs the command with the fake server, without errors; returns what it printed, and its result lines."""

    def run(*flags):
        path = tmp_path / "lines.jsonl"
        code, output, errors = inside("--base-url", fake.address, *flags, "--output-file", path)
        assert (code, errors) == (0, "")
        lines = read_lines(path)
        path.unlink()
        return output, *lines

    return run
