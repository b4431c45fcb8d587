"""The benchmark of answers with a ``kv_budget``, in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT


@pytest.mark.nightly
def test_each_method_and_each_budget_has_a_line(tmp_path: Path) -> None:
    output = tmp_path / "lines.jsonl"
    flags = ["--small", "--families", "chat", "--cases", "2", "--length", "500", "--shares", "0.5", "--repeat", "2"]
    command = [sys.executable, "-m", "bench.paged_eviction", "--output-file", str(output), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    *of_accuracy, of_decode, of_memory = [
        json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()
    ]
    assert [line["method"] for line in of_accuracy] == ["all", "paged", "window", "sink", "random"]
    assert all(line["mean_skipped_tokens"] > 0 for line in of_accuracy[1:])
    assert of_accuracy[0]["mean_skipped_tokens"] == of_accuracy[0]["mean_freed_tokens"] == 0
    assert (of_decode["kv_budget"], of_decode["rows"], of_decode["pairs"]) == (64, 4, 2)
    assert of_memory["paged_preemptions"] < of_memory["all_preemptions"]
    assert min(of_decode["all_ms"], of_decode["paged_ms"]) > 0
