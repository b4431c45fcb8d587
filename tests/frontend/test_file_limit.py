"""The limit of open files, tested in subprocesses because they change their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.live import LIMIT_S

CODE = """
import resource
from radixkv.frontend.process import raise_file_limit

resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
raise_file_limit(max_queued_requests=400, max_num_seqs={n_rows})
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def limits(soft: int, hard: int, n_rows: int | None) -> tuple[str, str]:
    code = CODE.format(soft=soft, hard=hard, n_rows=n_rows)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return done.stdout, done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("n_rows", [None, 36])
def test_the_soft_limit_is_raised_to_the_hard_limit(n_rows: int | None) -> None:
    assert limits(256, 500, n_rows) == ("500 500\n", "")


def test_a_limit_below_the_queues_need_is_logged() -> None:
    out, log = limits(256, 499, 36)
    assert out == "499 499\n"
    assert log.startswith("radixkv: ")
    assert "499 files" in log
    assert " 500 " in log
    assert log.count("\n") == 1
