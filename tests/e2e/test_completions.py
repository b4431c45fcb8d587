from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.live import LIMIT_S, LiveServer, wait_for

SHARED = "Question: Ann has 3 apples and buys 4. How many has she?\nAnswer: 7.\n" * 8


pytestmark = pytest.mark.usefixtures("exact_and_idle_afterwards")


def stream(server: LiveServer, **body: Any) -> list[dict[str, Any]]:
    lines = server.http.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "Hello", "max_tokens": 24, "temperature": 0, "ignore_eos": True},
        {"prompt": "Hello", "max_tokens": 40, "temperature": 1.0, "seed": 7, "ignore_eos": True},
        {"prompt": ["one", "two two", "three"], "max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "seed": 3},
        {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 9, "temperature": 0, "ignore_eos": True},
    ],
)
def test_streaming_equals_not_streaming(server: LiveServer, body: dict[str, Any]) -> None:
    whole = server.complete(**body, return_token_ids=True)
    events = stream(server, **body, return_token_ids=True, stream_options={"include_usage": True})
    usage = events.pop()["usage"]
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[key] == whole["usage"][key]
    for choice in whole["choices"]:
        pieces = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]


def test_a_prompts_token_ids_give_the_same_answer(server: LiveServer) -> None:
    text = server.complete(prompt="Hello there", max_tokens=12, temperature=0, return_token_ids=True)
    ids = text["choices"][0]["prompt_token_ids"]
    again = server.complete(prompt=ids, max_tokens=12, temperature=0, return_token_ids=True)
    assert again["choices"] == text["choices"]


def test_each_prompt_of_a_request_is_answered_as_if_alone(server: LiveServer) -> None:
    prompts = [SHARED + f"Question: {i} + {i}?\nAnswer:" for i in range(12)]
    settings = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    batch = server.complete(prompt=prompts, **settings)["choices"]
    assert [choice["index"] for choice in batch] == list(range(12))
    for prompt, choice in list(zip(prompts, batch, strict=True))[::4]:
        alone = server.complete(prompt=prompt, **settings, skip_reading_prefix_cache=True)["choices"][0]
        assert alone["token_ids"] == choice["token_ids"]


def test_cached_tokens_salts_and_skipping(server: LiveServer) -> None:
    def cached(**body: Any) -> int:
        usage = server.complete(prompt=SHARED, max_tokens=1, temperature=0, **body)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    server.http.post("/flush_cache")
    assert cached() == 0
    assert cached() > 100
    assert cached(skip_reading_prefix_cache=True) == 0
    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") > 100
    assert cached(cache_salt="b") == 0


def test_a_stop_string_that_crosses_tokens(server: LiveServer) -> None:
    settings = {"prompt": "Once", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    text = server.complete(**settings)["choices"][0]["text"]
    start = next(i for i in range(4, len(text) - 8) if "�" not in text[i : i + 8])
    stop = text[start : start + 8]
    stopped = server.complete(**settings, stop=stop)["choices"][0]
    assert stopped["text"] == text[: text.index(stop)]
    assert stopped["finish_reason"] == "stop"
    streamed = stream(server, **settings, stop=[stop])
    assert "".join(event["choices"][0]["text"] for event in streamed) == stopped["text"]


def test_seeds_determine_answers(server: LiveServer) -> None:
    def sample(seed: int) -> list[int]:
        body = server.complete(prompt="Hello", max_tokens=16, seed=seed, ignore_eos=True, return_token_ids=True)
        return body["choices"][0]["token_ids"]

    assert sample(1) == sample(1) != sample(2)
    assert len({tuple(sample(-1)) for _ in range(3)}) == 3, "-1 is no seed"


def test_a_seeded_answer_is_the_same_alone_and_in_a_batch(server: LiveServer) -> None:
    settings = {"max_tokens": 24, "seed": 5, "ignore_eos": True, "return_token_ids": True}
    alone = server.complete(prompt=SHARED, **settings)["choices"][0]["token_ids"]
    with ThreadPoolExecutor(12) as threads:
        others = [
            threads.submit(server.complete, prompt=f"{i} {SHARED}" * (i % 3 + 1), max_tokens=30, seed=i)
            for i in range(10)
        ]
        same = [threads.submit(server.complete, prompt=SHARED, **settings) for _ in range(4)]
        assert [reply.result()["choices"][0]["token_ids"] for reply in same] == [alone] * 4
        assert all(reply.result()["choices"] for reply in others)


def test_a_reset_reports_leased_pages(server: LiveServer) -> None:
    with server.http.stream(
        "POST", "/v1/completions", json={"prompt": SHARED, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    ) as reply:
        lines = reply.iter_lines()  # kept alive: the connection closes with it
        next(lines)
        assert server.http.get("/flush_cache").json()["pages_held"] > 0
    wait_for(server.is_idle, "pages are left")
    assert server.http.get("/flush_cache").json()["pages_held"] == 0
    assert server.metric("kv_pages_free") == server.n_pages


@pytest.mark.parametrize("streams", [True, False])
def test_a_disconnect_frees_the_pages(server: LiveServer, streams: bool) -> None:
    body = {"prompt": [SHARED, "another"], "max_tokens": 4000, "ignore_eos": True, "stream": streams}
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(data)
    n_before = server.metric("generation_tokens_total")
    with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S) as connection:
        connection.sendall(head + data)
        wait_for(lambda: server.metric("num_requests_running") == 2, "never ran")
        steps = server.metric("steps_total")
        wait_for(lambda: server.metric("steps_total") > steps, "no step")
    wait_for(server.is_idle, "still held")
    assert server.metric("generation_tokens_total") - n_before < 4000, "it was computed for nobody"


def test_a_request_that_can_never_fit_is_refused(server: LiveServer) -> None:
    reply = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1_000_000})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_metrics_are_prometheus_text(server: LiveServer) -> None:
    lines = server.http.get("/metrics").text.splitlines()
    sample = re.compile(
        r"radixkv:\w+(\{(le|finish_reason|rendered|stage|reason|result|tier|source|position)=\"[^\"]+\"\})? \S+"
    )
    assert all(line.startswith("#") or sample.fullmatch(line) for line in lines)
    names = {line.split("{")[0].split()[0] for line in lines if not line.startswith("#")}
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        assert f"radixkv:{name}_seconds_bucket" in names
    assert "radixkv:request_queue_time_seconds_count" in names
    assert server.metric("generation_tokens_total") > 0
    assert server.metric("kv_cache_usage_perc") == 0


def test_the_frontend_does_not_load_torch(server: LiveServer) -> None:
    def maps(pid: int) -> str:
        return Path(f"/proc/{pid}/maps").read_text()

    assert "libtorch" in maps(server.runtime_pid)
    assert "libtorch" not in maps(server.process.pid)


@pytest.mark.nightly
def test_a_port_in_use_is_reported_before_anything_starts(server: LiveServer) -> None:
    command = [sys.executable, "-m", "radixkv.cli", "serve", "--port", str(server.port)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode != 0
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1
    assert f"port {server.port} on 127.0.0.1 is used by another program" in ended.stderr
