"""A server that serves less than its model could says so when it starts."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.live import serving


def test_a_narrow_pool_and_a_missing_tokenizer_are_told(sensitive: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sensitive, tmp_path / "textless")
    (folder / "tokenizer.json").unlink()
    errors = tmp_path / "errors"
    with serving(folder, errors, "--max-total-tokens", "64") as live:
        assert live.complete(prompt=[5] * 64, max_tokens=1)["usage"]["prompt_tokens"] == 64
        longest = live.http.get("/v1/models").json()["data"][0]["max_model_len"]
        refused = live.http.post("/v1/completions", json={"prompt": [5] * longest, "max_tokens": 1})
        assert (longest, refused.status_code) == (65, 400)
    lines = errors.read_text().splitlines()
    assert [
        line for line in lines if line.startswith("radixkv: the pool holds 64 tokens, fewer than max_model_len")
    ]
    assert [line for line in lines if "has no tokenizer.json" in line and "--tokenizer" in line]


def test_a_server_that_serves_all_warns_of_nothing(sensitive: Path, tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with serving(sensitive, errors):
        pass
    assert not any(text in errors.read_text() for text in ("fewer than max_model_len", "has no tokenizer.json"))
