import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

BENCH = ROOT / "bench" / "tree.py"


@pytest.mark.nightly
def test_bench_writes_a_line_for_each_case(tmp_path: Path) -> None:
    output = tmp_path / "tree.jsonl"
    subprocess.run([sys.executable, BENCH, "--quick", "--output-file", output], check=True, capture_output=True)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["case"] for line in lines] == [
        "match_one_edge",
        "match_32_edges",
        "lease_commit_release_32k",
        "commit_one_page_at_16k",
        "evict",
        "evict",
        "evict_lfuda",
        "evict_lfuda",
        "evict_adaptive",
        "evict_adaptive",
        "memory",
    ]
    for line in lines:
        assert line["nodes"] > 0
        assert {"environment", "date", "gc"} <= line.keys()
        assert line["bytes"] > 0 if line["case"] == "memory" else line["us_per_op"] > 0
