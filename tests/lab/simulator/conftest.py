"""What the tests of ``radixkv simulate`` share."""

import pytest

from support.json_lines import read_lines
from support.simulate_command import simulate


@pytest.fixture
def simulated(tmp_path):
    """Runs a command that succeeds; returns its result lines."""

    def run(*flags):
        file = tmp_path / "simulated.jsonl"
        assert simulate(*flags, "--output-file", file) == 0
        rows = read_lines(file)
        file.unlink()
        return rows

    return run
