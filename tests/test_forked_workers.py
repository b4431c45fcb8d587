"""``pytest --forks`` runs every test once, and reports what pytest alone reports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.live import LIMIT_S

PASSES = """
import os
import pytest

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("of_the_module")
    yield made
    made.rmdir()
    print("removed")

@pytest.mark.parametrize("number", range(3))
def test_numbers(folder, number):
    with open(os.environ["RUNS"], "a") as runs:
        runs.write(f"{os.getpid()} {folder} {number}\\n")
"""
FAILS = """
import pytest

@pytest.fixture
def broken():
    yield
    raise ValueError("the end of a fixture")

def test_wrong():
    print("printed before")
    assert [1, 2] == [1, 3]

def test_end(broken):
    pass

def test_start(absent):
    pass

@pytest.mark.xfail(strict=True)
def test_expected():
    assert False
"""
DIES = """
import os

def test_before():
    pass

def test_dies():
    os._exit(7)

def test_behind():
    pass
"""

WRONG = """
import os
from pathlib import Path

def test_wrong():
    new = Path(os.environ["RUNS"] + ".new")
    new.write_text(str(os.getpid()))
    new.rename(os.environ["RUNS"] + ".pid")
    assert False

def test_behind():
    pass
"""
WAITS = """
import os
from pathlib import Path
from support.live import wait_for

def is_gone(file):
    try:
        os.kill(int(file.read_text()), 0)
    except ProcessLookupError:
        return True
    return False

def test_of_another_process():
    file = Path(os.environ["RUNS"] + ".pid")
    wait_for(file.exists, "no test has failed")
    wait_for(lambda: is_gone(file), "the process of the failed test does not end")
"""


def run(folder: Path, *flags: str, **files: str) -> tuple[int, str]:
    """Runs pytest with files of tests; returns its exit code and its output."""
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    # No other plugins: those of this run would be imported, too.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "RUNS": str(folder / "runs"),
    }
    command = [sys.executable, "-m", "pytest", "-p", "support.forked_workers", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), "--basetemp", str(folder / "temporary"), "-rA", *flags, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return done.returncode, done.stdout


def summary(output: str) -> set[tuple[str, str]]:
    """Returns the outcomes with the names of their tests."""
    return set(re.findall(r"^(PASSED|FAILED|ERROR|XFAIL) \S+::(\S+)", output, re.MULTILINE))


def test_tests_have_the_outcomes_that_they_have_without_it(tmp_path: Path) -> None:
    files = {"passes": PASSES, "fails": FAILS}
    alone, forked = (run(tmp_path, *flags, **files) for flags in ([], ["--forks", "2"]))
    assert summary(forked[1]) == summary(alone[1])
    assert len(summary(alone[1])) == 8
    assert forked[0] == alone[0] == 1
    for text in ("printed before", "At index 1 diff: 2 != 3", "the end of a fixture", "fixture 'absent' not found"):
        assert text in forked[1]


def test_each_test_runs_once_and_a_file_in_one_process(tmp_path: Path) -> None:
    code, output = run(tmp_path, "--forks", "3", **{f"passes{n}": PASSES for n in range(8)})
    assert (code, "24 passed" in output) == (0, True)
    runs = [line.split() for line in (tmp_path / "runs").read_text().splitlines()]
    assert len(runs) == 24
    of_files = {folder: pid for pid, folder, _ in runs}
    assert len(of_files) == 8, "a module's fixture is made once"
    assert all(of_files[folder] == pid for pid, folder, _ in runs)
    assert not any(Path(folder).exists() for folder in of_files), "a module's fixture has ended"


def test_the_test_in_which_a_process_ends_has_failed(tmp_path: Path) -> None:
    code, output = run(tmp_path, "--forks", "2", dies=DIES, passes=PASSES)
    assert code == 1
    assert summary(output) >= {("PASSED", "test_before"), ("FAILED", "test_dies"), ("PASSED", "test_numbers[2]")}
    assert "ended with 7" in output


def test_no_file_is_begun_after_as_many_failures_as_may_be(tmp_path: Path) -> None:
    """But the one that each process has taken before."""
    files = {"a": WRONG, "b": WAITS, **{f"later{n}": PASSES for n in range(8)}}
    code, output = run(tmp_path, "--forks", "2", "--maxfail", "1", **files)
    assert code == 1
    assert "stopping after 1 failures" in output
    assert {("FAILED", "test_wrong"), ("PASSED", "test_of_another_process")} <= summary(output)
    runs = tmp_path / "runs"
    assert not runs.exists() or len(runs.read_text().splitlines()) <= 3
