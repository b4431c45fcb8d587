"""The benchmark of slabs beside memory in which any free pages make room for a window page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT


@pytest.mark.nightly
def test_each_workload_has_a_line_for_both_kinds_of_memory(tmp_path: Path) -> None:
    output = tmp_path / "whole_slabs.jsonl"
    arguments = ["--scale", "0.02", "--pages", "1500", "--workloads", "fewshot,agents", "--output-file", output]
    subprocess.run([sys.executable, ROOT / "bench/whole_slabs.py", *arguments], check=True, capture_output=True)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    kinds = [(line["workload"], line["memory"]) for line in lines]
    assert kinds == [(name, kind) for name in ("fewshot", "agents") for kind in ("slabs", "any_pages")]
    assert all(line["hit_rate_pct"] > 20 for line in lines)
