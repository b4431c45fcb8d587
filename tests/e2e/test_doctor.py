"""Cache misses explained unasked, on a real server: in usage, by ``/cache/doctor`` and by ``radixkv doctor``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from support.live import LIMIT_S, LiveServer, complaints

HEAD = "You are a careful assistant of a workshop that repairs bicycles. billing: version=2.1.100; entry=cli; cch="
RULES = " Answer in short steps. Name the tool for each of them, and say what to do if the tool is missing." * 3


def prompts() -> list[str]:
    return [f"{HEAD}{nonce};{RULES}" for nonce in ("1f0ab", "e2c87", "7d93b", "a551e")]


def usage_details(reply: Any) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    details: dict[str, Any] = reply.json()["usage"]["prompt_tokens_details"]
    return details


@pytest.mark.nightly
def test_a_nonce_in_the_system_prompt_is_named(start: Callable[..., AbstractContextManager[LiveServer]]) -> None:
    with start() as server:
        where = len(server.http.post("/tokenize", json={"prompt": HEAD}).json()["tokens"])
        for prompt in prompts():
            body = {"prompt": prompt, "max_tokens": 1, "explain_cache": True}
            details = usage_details(server.http.post("/v1/completions", json=body))
        difference = details["cache_miss"]["first_difference"]
        assert where - 1 <= difference["position"] <= where + 2
        assert "cch=" in difference["after"]
        assert details["cached_tokens"] == difference["position"]
        report = server.http.get("/cache/doctor").json()
        (worst,) = [place for place in report["misses"] if place["reason"] == "differs"]
        assert worst["requests"] == 3
        assert worst["share"] > 0.6
        assert where - 1 <= worst["first_difference"]["position"] <= where + 2
        assert "cch=" in worst["text"]
        generated = server.http.post("/generate", json={"text": HEAD + "0", "explain_cache": True})
        assert "cache_miss" not in generated.json()["meta_info"], "less than a page is missing"
        generated = server.http.post("/generate", json={"text": HEAD + RULES, "explain_cache": True})
        assert generated.json()["meta_info"]["cache_miss"]["reason"] == "differs"
        done = subprocess.run(
            [sys.executable, "-m", "radixkv.cli", "doctor", "--base-url", server.base_url],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert (done.returncode, complaints(done.stderr)) == (0, "")
        assert "cch=" in done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [["--no-explain-contents"], ["--api-key", "k"]], ids=" ".join)
def test_a_server_that_hides_contents_tells_whole_pages(
    start: Callable[..., AbstractContextManager[LiveServer]], flags: list[str]
) -> None:
    with start(*flags) as server:
        server.http.headers["Authorization"] = "Bearer k"
        for prompt in prompts():
            body = {"prompt": prompt, "max_tokens": 1, "explain_cache": True}
            details = usage_details(server.http.post("/v1/completions", json=body))
        miss = details["cache_miss"]
        assert miss.keys() == {"reason", "matched_tokens"}
        assert miss["matched_tokens"] % 16 == 0
        report = server.http.get("/cache/doctor")
        assert "cch" not in report.text
        assert "first_difference" not in report.text
        body = {"prompt": prompts()[0], "max_tokens": 1, "explain_cache": True, "cache_salt": "hers"}
        miss = usage_details(server.http.post("/v1/completions", json=body))["cache_miss"]
        assert miss == {"reason": "never_seen", "matched_tokens": 0}
