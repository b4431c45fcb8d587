"""Warnings at the start of a server that serves less than its model could."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from support.live import LiveServer, serving


@pytest.mark.nightly
def test_a_small_pool_and_a_missing_tokenizer_give_warnings(sensitive: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sensitive, tmp_path / "textless")
    (folder / "tokenizer.json").unlink()
    errors = tmp_path / "errors"
    flags = ("--max-total-tokens", "64", "--device", "cpu", "--mem-fraction-static", "0.5")
    with serving(folder, errors, *flags) as live:
        command = [live.process.stdout.readline() for _ in range(2)][1].partition(": ")[2]
        done = subprocess.run(command, shell=True, capture_output=True)
        assert json.loads(done.stdout)["usage"]["completion_tokens"] > 0, "a command that needs no tokenizer"
        assert live.complete(prompt=[5] * 64, max_tokens=1)["usage"]["prompt_tokens"] == 64
        longest = live.http.get("/v1/models").json()["data"][0]["max_model_len"]
        refused = live.http.post("/v1/completions", json={"prompt": [5] * longest, "max_tokens": 1})
        assert (longest, refused.status_code) == (65, 400)
    lines = errors.read_text().splitlines()
    assert [line for line in lines if "64 tokens" in line and "max_model_len" in line]
    (ineffective,) = [line for line in lines if "gpu_memory_utilization 0.5" in line]
    assert "max_total_tokens, 64," in ineffective
    assert [line for line in lines if "tokenizer.json" in line and "--tokenizer" in line]


@pytest.mark.nightly
def test_a_server_without_limits_gives_no_warning(plain_server: LiveServer) -> None:
    errors = (plain_server.folder / "errors").read_text()
    assert not any(text in errors for text in ("max_model_len", "tokenizer.json"))
