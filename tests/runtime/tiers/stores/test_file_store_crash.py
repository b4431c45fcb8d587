"""``kill -9`` at random points of a process that stores pages: no wrong page is ever read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from support import page_writer
from support.page_files import file_store, keys_of, load_run, page_files, page_of
from support.page_writer import MAX_BYTES, PAGE_BYTES, RUNS


def write_until_killed(path: Path, seed: int) -> None:
    """Runs a process that stores pages; kills it up to 50 ms after the store has a page."""
    command = [sys.executable, page_writer.__file__, str(path), str(seed)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as writer:
        assert writer.stdout.readline() == b"storing\n"
        time.sleep(Random(seed).random() * 0.05)
        writer.send_signal(signal.SIGKILL)
    assert writer.returncode == -signal.SIGKILL


def check_pages(path: Path, caplog: pytest.LogCaptureFixture) -> int:
    """Loads all pages that are there, and checks them; returns how many are there."""
    with file_store(path, page_bytes=PAGE_BYTES, max_bytes=MAX_BYTES) as store:
        n_pages = store.n_pages
        assert n_pages == len(page_files(path)), "no temporary file is left"
        assert store.n_bytes == sum(file.stat().st_size for file in page_files(path)) <= MAX_BYTES
        for run in RUNS:
            n_present = store.run(keys_of(run))
            assert load_run(store, run) == [page_of(key, PAGE_BYTES) for key in keys_of(run)[:n_present]]
    assert not caplog.records, "the kernel has all of a file that was renamed"
    return n_pages


@pytest.mark.parametrize("n_kills", [4, pytest.param(200, marks=pytest.mark.nightly)])
def test_kill(tmp_path: Path, caplog: pytest.LogCaptureFixture, n_kills: int) -> None:
    path = tmp_path / "pages"
    numbers = []
    for seed in range(n_kills):
        write_until_killed(path, seed)
        numbers.append(check_pages(path, caplog))
    assert any(numbers), "nothing was ever stored"
