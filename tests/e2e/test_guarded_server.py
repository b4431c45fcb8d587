"""A server with an API key, statistics in its log and SGLang's metric names."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from support.live import CANARY, LIMIT_S, serving, wait_for

KEY = "sesame-0123456789"
FLAGS = (
    "--stats-interval",
    "0.2",
    "--metrics-compat",
    "sglang",
    "--served-model-name",
    "name",
    "--max-model-len",
    "128",
)


@pytest.mark.nightly
def test_a_guarded_server_from_its_start_to_its_end(sensitive: Path, tmp_path: Path) -> None:
    log = tmp_path / "errors"
    with serving(sensitive, log, *FLAGS, key=KEY) as live:
        shown = [live.process.stdout.readline().strip() for _ in range(2)]
        (page,) = re.findall(r"http://\S+", shown[0])
        assert page == f"{live.base_url}/ui"
        assert httpx.get(page).status_code == 200
        command = shown[1].partition(": ")[2]
        assert command.startswith("curl ")
        done = subprocess.run(command, shell=True, capture_output=True, env={**os.environ, "RADIXKV_API_KEY": KEY})
        assert json.loads(done.stdout)["usage"]["completion_tokens"] > 0, done

        for path in ("/v1/models", "/metrics", "/server_info"):
            assert httpx.get(live.base_url + path).status_code == 401
        assert httpx.post(live.base_url + "/cache/match", json={"prompt": "a"}).status_code == 401
        assert httpx.get(live.base_url + "/health").status_code == 200
        elsewhere = httpx.get(
            live.base_url + "/v1/models", headers={**live.http.headers, "Host": "gpu.example.org"}
        )
        assert elsewhere.json()["data"][0]["id"] == "name"

        expected = live.canary()
        body = {"text": CANARY["prompt"], "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
        assert live.http.post("/generate", json=body).json()["output_ids"] == expected
        ids = live.http.post("/tokenize", json={"prompt": CANARY["prompt"]}).json()["tokens"]
        explained = live.http.post("/cache/explain", json={"prompt": ids}).json()
        assert (explained["reason"], explained["prompt_tokens"]) == ("whole", len(ids))
        # Token by token, another client's prompt could be guessed: pages are copied in part, but not counted.
        long = (ids * 4)[:48]
        live.http.post("/generate", json={"input_ids": long, "sampling_params": {"max_new_tokens": 1}})
        branch = {"input_ids": [*long[:40], 5, 6, 7], "sampling_params": {"max_new_tokens": 1}}
        explained = live.http.post("/cache/explain", json={"prompt": branch["input_ids"]}).json()
        meta = live.http.post("/generate", json=branch).json()["meta_info"]
        assert meta["cached_tokens"] == explained["cached_tokens"] == 32
        (matched,) = live.http.post("/cache/match", json={"prompt": branch["input_ids"]}).json()["prompts"]
        assert matched == {"prompt_tokens": 43, "matched_tokens": {"device": 32}}
        hers = live.http.post("/cache/explain", json={"prompt": ids, "cache_salt": "hers"}).json()
        assert (hers["reason"], hers["cached_tokens"]) == ("never_seen", 0)
        assert "cached_elsewhere_tokens" not in hers
        assert live.http.post("/reset_prefix_cache").json()["pages_held"] == 0
        assert live.http.post("/cache/explain", json={"prompt": ids}).json()["cached_tokens"] == 0
        assert 'sglang:num_running_reqs{model_name="name"} 0.0' in live.http.get("/metrics").text
        assert live.canary() == expected

        wait_for(
            lambda: log.read_text().splitlines()[-1].startswith("radixkv: 0 running, 0 waiting"), "no statistics"
        )
        for pid in (live.process.pid, live.runtime_pid):
            assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert KEY not in live.http.get("/server_info").text
        live.process.send_signal(signal.SIGTERM)
        assert live.process.wait(timeout=LIMIT_S) == 0
        assert "radixkv: SIGTERM ends the server\n" in log.read_text()
    lines = log.read_text().splitlines()
    assert KEY not in log.read_text()
    assert all(line.startswith("radixkv: ") for line in lines), lines
