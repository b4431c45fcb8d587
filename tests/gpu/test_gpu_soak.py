"""A short run of ``bench/gpu_soak.py``, and one under NVIDIA's memory checker."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_support import DEVICE

from support.paths import ROOT

SOAK = ROOT / "bench" / "gpu_soak.py"


def test_pages_memory_and_terminal_messages_add_up(tmp_path: Path) -> None:
    output = tmp_path / "soak.jsonl"
    command = [sys.executable, SOAK, "--requests", "900", "--every", "300", "--device", DEVICE]
    done = subprocess.run([*command, "--output-file", output], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = map(json.loads, output.read_text(encoding="utf-8").splitlines())
    assert sum(line["ends"].values()) == line["requests"] == 900
    assert line["ends"]["abort"] > 10
    assert line["preemptions_total"] > 0
    assert line["pages_evicted_total"] > 0


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer on the PATH")
def test_no_kernel_touches_memory_that_is_not_its_own() -> None:
    checker = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all"]
    # One check at the end: the checker's own memory on the GPU grows with each kernel's first use.
    command = [*checker, sys.executable, str(SOAK), "--requests", "6", "--every", "6"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
