"""Chats as a workload and ``radixkv explain``, on real servers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.live import LIMIT_S, LiveServer, complaints


def radixkv(*flags: object, lines: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "radixkv.cli", *map(str, flags)]
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.nightly
def test_chats_with_the_cache_off_and_on_give_the_same_tokens(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    flags = ["--num-sessions", 3, "--num-turns", 3, "--num-shots", 1, "--output-len", 6, "--warmup-requests", 1]
    flags += ["--max-total-tokens", 8192, "--grammar-backend", "none", "--output-file", path]
    done = radixkv("bench", "--workload", "multiturn", "--compare-cache", *flags)
    assert (done.returncode, complaints(done.stderr)) == (0, "")
    assert "Outputs equal: yes" in done.stdout
    off, on = map(json.loads, path.read_text().splitlines())
    assert off["cache_report"]["total_cached_tokens"] == 0
    report = on["cache_report"]
    assert report["optimum_pct"] == off["cache_report"]["optimum_pct"] > 60
    assert 0.85 * report["optimum_pct"] <= report["cache_hit_rate_pct"] <= report["optimum_pct"]


def test_unshared_prompts_have_no_cache_hits(server: LiveServer, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    flags = ["--num-prompts", 4, "--num-shots", 1, "--output-len", 4, "--output-file", path]
    done = radixkv("bench", "--workload", "unshared", "--base-url", server.base_url, *flags)
    assert (done.returncode, complaints(done.stderr)) == (0, "")
    report = json.loads(path.read_text())["cache_report"]
    assert report["total_cached_tokens"] == 0
    assert report["optimum_pct"] < 5


def test_explain_shows_where_the_match_ends(server: LiveServer) -> None:
    server.http.post("/flush_cache")
    text = "You are a patient teacher of mathematics who answers in short steps. How many legs have 12 hens? "
    text += "Show the whole calculation, and write the result alone on the last line of your answer."
    server.complete(prompt=text, max_tokens=1)
    done = radixkv("explain", text.replace("12 hens", "7 cows"), "--base-url", server.base_url)
    assert (done.returncode, complaints(done.stderr)) == (0, "")
    sentence, before, after = done.stdout.splitlines()
    assert "28 of " in sentence
    assert "other requests went on in another way" in sentence
    assert "'7' (" in sentence
    assert "How many legs have " in before
    assert "7 cows? Show" in after
    nothing = radixkv("explain", "Never asked", "--base-url", server.base_url)
    assert nothing.stdout.startswith("0 of ")
    assert nothing.returncode == 0


def test_a_chat_reuses_its_earlier_turns(server: LiveServer) -> None:
    flags = ["--system", "You are a patient teacher of mathematics.", "--max-tokens", 6, "--temperature", 0]
    lines = "How many legs have 12 hens?\nAnd how many legs have 7 cows?\n"
    done = radixkv("chat", "--base-url", server.base_url, *flags, lines=lines)
    assert (done.returncode, complaints(done.stderr)) == (0, "")
    turns = re.findall(r"\[(\d+) of (\d+) prompt tokens from the cache, 6 new tokens", done.stdout)
    (_, first), (cached, second) = ((int(a), int(b)) for a, b in turns)
    assert first - 16 < cached < second


RULES = "You are a patient teacher of mathematics. Answer in short steps, and write the result on the last line."
ASKED = [{"role": "user", "content": "How many legs have 12 hens?"}]
BODIES = {
    "/v1/completions": {"prompt": RULES, "max_tokens": 1, "temperature": 0, "stream": False},
    "/v1/chat/completions": {"messages": [{"role": "system", "content": RULES}, *ASKED], "max_tokens": 1},
    "/v1/messages": {
        "system": [{"type": "text", "text": RULES}],
        "messages": [*ASKED, {"role": "assistant", "content": [{"type": "text", "text": "They have "}]}],
        "stop_sequences": ["."],
        "max_tokens": 1,
        "cache_salt": "hers",
    },
    "/v1/responses": {"instructions": RULES, "input": ASKED, "max_output_tokens": 1, "cache_salt": "his"},
}


@pytest.mark.parametrize("path", BODIES)
def test_the_body_of_a_request_to_any_api_is_explained(server: LiveServer, path: str) -> None:
    server.http.post("/flush_cache")
    ask = f"/cache/explain?path={path}&return_token_ids=true"
    before = server.http.post(ask, json=BODIES[path])
    assert before.status_code == 200, before.text
    assert before.json()["cached_tokens"] == 0
    usage = server.http.post(path, json=BODIES[path]).json()["usage"]
    n_prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0)) + usage.get(
        "cache_creation_input_tokens", 0
    )
    after = server.http.post(ask, json=BODIES[path]).json()
    assert after["prompt_tokens"] == len(after["prompt_token_ids"]) == before.json()["prompt_tokens"] == n_prompt
    assert after["cached_tokens"] >= n_prompt - 16
    others = {**BODIES[path], "cache_salt": "nobody"}
    assert server.http.post(ask, json=others).json()["reason"] == "other_namespace"


def test_a_path_without_prompts_is_refused_by_name(server: LiveServer) -> None:
    refused = server.http.post("/cache/explain?path=/v1/embeddings", json={"prompt": "a"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "path"
    assert "/v1/messages" in refused.json()["error"]["message"]
