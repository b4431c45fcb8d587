"""The bench of a hybrid model's hit rates beside an oracle's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT


@pytest.mark.nightly
def test_states_find_nearly_all_that_an_oracle_does_where_there_is_one_for_each_prompt(tmp_path: Path) -> None:
    output = tmp_path / "state_hits.jsonl"
    arguments = ["--scale", "0.05", "--memory", "400000", "--output-file", output]
    subprocess.run([sys.executable, ROOT / "bench/state_hits.py", *arguments], check=True, capture_output=True)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["workload"] for line in lines] == ["fewshot", "multiturn", "multiturn", "agents"]
    assert [line["repeats_answers"] for line in lines] == [False, False, True, False]
    for line in lines:
        assert 97 <= line["of_oracle_pct"] <= 100 or line["workload"] == "fewshot"
        assert line["states"] == 51
