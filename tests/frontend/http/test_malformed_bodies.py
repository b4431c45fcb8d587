from __future__ import annotations

import json
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from radixkv.frontend.http import error_response
from radixkv.frontend.served_model import ServedModel
from radixkv.text.tokenizer import Tokenizer
from support import site_requests
from support.live import LIMIT_S
from support.running_site import running_site
from support.scripted_runtime import MAX_MODEL_LEN, VOCAB_SIZE, Site
from support.site_requests import COMPLETIONS_HEAD, post_bytes, until_closed

SECRET = "do-not-repeat-me"

BAD_BODIES: list[tuple[str, bytes, str | None]] = [
    ("empty", b"", None),
    ("no JSON", b"prompt=x", None),
    ("an array", b"[]", None),
    ("cut off", b'{"prompt": "' + SECRET.encode(), None),
    ("two values", b'{"prompt": "a"} 1', None),
    ("NaN", b'{"prompt": "a", "temperature": NaN}', None),
    ("infinite", b'{"prompt": "a", "temperature": 1e999}', "temperature"),
    ("deep, unknown field", b'{"prompt": "a", "x": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", None),
    ("deep, known field", b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", None),
    ("deep, refused field", b'{"prompt": "a", "tools": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", None),
    ("lone surrogate", b'{"prompt": "\\ud800"}', None),
    ("lone surrogate in salt", b'{"prompt": "a", "cache_salt": "\\udc00"}', None),
    ("invalid UTF-8", b'{"prompt": "\xff"}', None),
    ("a huge integer", b'{"prompt": [1' + b"0" * 4000 + b"]}", "prompt"),
]

BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": SECRET, "model": 3}, "model"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, [2]]}, "prompt"),
    ({"prompt": {"text": SECRET}}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.0]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [VOCAB_SIZE]}, "prompt"),
    ({"prompt": [1 << 40]}, "prompt"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 0, "stream": True}, "stream"),
    ({"prompt": "a", "max_tokens": 0, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"prompt": "a", "max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**15}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
    ({"prompt": "a", "temperature": SECRET}, "temperature"),
    ({"prompt": "a", "top_k": 10**20}, "top_k"),
    ({"prompt": "a", "stop": ""}, "stop"),
    ({"prompt": "a", "stop": 3}, "stop"),
    ({"prompt": "a", "ignore_eos": 1}, "ignore_eos"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "stream": True, "stream_options": {"include_usage": 3}}, "stream_options"),
    ({"prompt": "a", "cache_salt": 5}, "cache_salt"),
    ({"prompt": "a", "session_id": 5}, "session_id"),
    ({"prompt": "a", "n": "two"}, "n"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "prompt_logprobs": True}, "prompt_logprobs"),
    ({"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"prompt": "a", "stream": True, "use_beam_search": True}, "use_beam_search"),
    ({"prompt": "a", "use_beam_search": True, "n": 65}, "n"),
    ({"prompt": "a", "use_beam_search": True, "temperature": -1}, "temperature"),
    ({"prompt": "a", "use_beam_search": True, "top_p": 0.5}, "top_p"),
    ({"prompt": "a", "use_beam_search": 1}, "use_beam_search"),
    ({"prompt": "a", "length_penalty": 2.0}, "length_penalty"),
    ({"prompt": "a", "logit_bias": {"five": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5": "much"}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": [5]}, "logit_bias"),
    ({"prompt": "a", "stop_token_ids": [1 << 70]}, "stop_token_ids"),
    ({"prompt": "a", "priority": 1.5}, "priority"),
    ({"prompt": "a", "skip_special_tokens": 0}, "skip_special_tokens"),
    ({"prompt": "a", "echo": 1}, "echo"),
]

UNSUPPORTED: list[tuple[str, Any]] = [
    ("best_of", 2),
    ("suffix", "x"),
    ("functions", [{}]),
    ("modalities", ["text", "audio"]),
    ("chat_template", "{{ messages }}"),
    ("structured_outputs", {"regex": "a", "whitespace_pattern": " "}),
    ("web_search_options", {}),
    ("truncate_prompt_tokens", 5),
    ("extra_key", "tenant"),
    ("extra_key", ["tenant", "user"]),
    ("structural_tag", {"type": "structural_tag"}),
    ("stop_regex", "a+"),
    ("no_stop_trim", True),
    ("custom_logit_processor", "x"),
    ("return_hidden_states", True),
    ("guided_whitespace_pattern", " "),
    ("vllm_xargs", {"a": 1}),
    ("data_parallel_rank", 0),
    ("thinking_token_budget", 5),
    ("functions", [[]] * 20_000),
]


post = partial(post_bytes, path="/v1/completions")


def check_refusal(reply: Any, status: int, code: str, param: str | None) -> None:
    assert SECRET not in reply.text
    site_requests.check_refusal(reply, param, code, status)


@pytest.mark.parametrize(("body", "param"), [case[1:] for case in BAD_BODIES], ids=[case[0] for case in BAD_BODIES])
def test_a_malformed_body_is_refused(site: Site, body: bytes, param: str | None) -> None:
    check_refusal(post(site, content=body), 400, "invalid_request", param)


@pytest.mark.parametrize(("body", "param"), BAD_FIELDS, ids=lambda value: json.dumps(value)[:40])
def test_a_field_with_a_wrong_type_or_value_is_refused(site: Site, body: dict[str, Any], param: str) -> None:
    reply = site.http.post("/v1/completions", json=body)
    check_refusal(reply, 400, "invalid_request", param)


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_an_unsupported_feature_is_refused_by_name(site: Site, name: str, value: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", chat)):
        reply = site.http.post(path, json={**body, name: value})
        check_refusal(reply, 400, "unsupported_feature", name)
        assert name in reply.json()["error"]["message"]


@pytest.mark.parametrize("field", ["seed", "max_tokens", "top_k"])
def test_a_huge_number_is_not_repeated(site: Site, field: str) -> None:
    reply = post(site, content=b'{"prompt": "a", "' + field.encode() + b'": ' + b"7" * 4000 + b"}")
    check_refusal(reply, 400, "invalid_request", field)
    assert len(reply.text) < 400


@pytest.mark.parametrize(
    ("prompt", "code", "text"),
    [
        ([[]] * 30_000, "invalid_request", "30000 prompts; at most 64"),
        (['a"'] * 10_000, "invalid_request", "10000 prompts; at most 64"),
        ([1] * 30_000, "context_length_exceeded", "30000 tokens"),
        ([[1, 2], [3] * 600], "context_length_exceeded", "600 tokens"),
        ([1, "a,b" * 1000], "invalid_request", "mixes"),
        ("é" * 3000, "context_length_exceeded", "3000 characters"),
    ],
)
def test_oversized_fields_are_refused_before_decoding(
    site: Site, prompt: Any, code: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*args: Any) -> bytes:
        raise AssertionError("the prompt was encoded")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    body: dict[str, Any] = {"prompt": prompt}
    if not isinstance(prompt, str):
        body = {"n": "which decoding would refuse first"} | body
    content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    reply = post(site, content=content)
    check_refusal(reply, 400, code, "prompt")
    assert text in reply.json()["error"]["message"]


def test_the_largest_allowed_bodies_are_served(site: Site) -> None:
    prompts = [[1] * (MAX_MODEL_LEN - 1)] * 2 + [[2]] * 62
    for separators in ((",", ":"), (" , ", " : ")):
        body = json.dumps({"prompt": prompts, "max_tokens": 1}, separators=separators)
        reply = post(site, content=body.encode())
        assert reply.status_code == 200, reply.text
        assert len(reply.json()["choices"]) == 64


LONG = b" " * 70_000
"""Padding that makes a field long enough for its lists to be decoded one by one."""


@pytest.mark.parametrize("gap", [b"", LONG], ids=["short", "long"])
@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_short_and_long_lists_of_ids_are_decoded_alike(site: Site, path: str, gap: bytes) -> None:
    body = {
        "/v1/completions": b'{"max_tokens": 3, "return_token_ids": true, "prompt": ',
        "/generate": b'{"sampling_params": {"max_new_tokens": 3}, "input_ids": ',
    }[path] + b"[[5, 6],%b [7]]}" % gap
    reply = post_bytes(site, path, body)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    answers = found["choices"] if path == "/v1/completions" else found
    ids = [one["token_ids" if path == "/v1/completions" else "output_ids"] for one in answers]
    assert ids == [[5, 6, 5], [7, 7, 7]]


NO_IDS = [b"1.5", b"true", b"null", b"{}", b"-1", b"300", b"2147483648", b"1" * 40]


@pytest.mark.parametrize("gap", [b"", LONG], ids=["short", "long"])
@pytest.mark.parametrize("last", [*NO_IDS, *(b"[1, %b]" % item for item in [*NO_IDS, b"[1]"])])
@pytest.mark.parametrize("field", ["prompt", "input_ids"])
def test_short_and_long_malformed_lists_of_ids_are_refused_alike(
    site: Site, field: str, last: bytes, gap: bytes
) -> None:
    body = b'{"%b": [[1],%b %b]}' % (field.encode(), gap, last)
    path = "/v1/completions" if field == "prompt" else "/generate"
    reply = post_bytes(site, path, body)
    check_refusal(reply, 400, "invalid_request", field)
    assert len(reply.content) < 300


def test_only_the_last_of_a_repeated_field_counts(site: Site) -> None:
    reply = post(
        site, content=b'{"prompt": ' + json.dumps([[]] * 9000).encode() + b', "prompt": "ab", "max_tokens": 2}'
    )
    assert reply.json()["choices"][0]["text"] == "ab"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
def test_a_body_without_a_json_content_type_is_refused(site: Site, kind: str) -> None:
    reply = site.http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": kind})
    check_refusal(reply, 400, "invalid_request", None)
    assert "application/json" in reply.json()["error"]["message"]


def test_a_compressed_body_is_refused_by_name(site: Site) -> None:
    for coding, status in (("gzip", 400), ("x-unknown", 400), ("Identity", 200), ("", 200)):
        headers = {"Content-Type": "application/json", "Content-Encoding": coding}
        reply = site.http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
        assert reply.status_code == status
        if status == 400:
            check_refusal(reply, 400, "unsupported_feature", None)
            assert "Content-Encoding" in reply.json()["error"]["message"]


def test_json_may_have_parameters(site: Site) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert site.http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "http://localhost.evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example"},
        {"Host": "evil.example:8000"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "[evil"},
        {"Host": "x@evil.example"},
        {"Host": "0.0.0.0"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
    ids=str,
)
def test_pages_of_other_sites_are_refused(site: Site, headers: dict[str, str]) -> None:
    for method, path in (("POST", "/v1/completions"), ("GET", "/flush_cache"), ("GET", "/metrics")):
        body = {"json": {"prompt": "a"}} if method == "POST" else {}
        reply = site.http.request(method, path, headers=headers, **body)
        check_refusal(reply, 403, "forbidden", None)


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "localhost:8000", "Origin": "http://localhost:3000"},
        {"Host": "127.0.0.1", "Origin": "http://127.0.0.1"},
        {"Host": "[::1]:8000", "Origin": "http://[::1]:80"},
        {"Host": "LOCALHOST", "Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
    ],
    ids=str,
)
def test_local_pages_and_other_clients_are_allowed(site: Site, headers: dict[str, str]) -> None:
    assert site.http.get("/v1/models", headers=headers).status_code == 200


def test_paths_are_exact_and_health_takes_head(site: Site) -> None:
    check_refusal(site.http.get("/metrics/"), 404, "not_found", None)
    assert site.http.head("/health").status_code == 200


def test_a_body_that_stalls_ends_the_connection(
    served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(error_response, "DISCARD_TIMEOUT_S", 0.2)
    with (
        running_site(served_model, tmp_path, body_limit_s=0.5) as site,
        socket.create_connection(("127.0.0.1", site.port), timeout=LIMIT_S) as connection,
    ):
        connection.sendall(COMPLETIONS_HEAD + b"Content-Length: 100\r\n\r\n{")
        reply = until_closed(connection)
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert b'"body_too_slow"' in reply


def test_neutral_values_and_unknown_fields_are_accepted(site: Site) -> None:
    neutral = {
        "n": 1,
        "best_of": 1,
        "logprobs": None,
        "echo": False,
        "suffix": None,
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1,
        "min_p": 0,
        "min_tokens": 0,
        "priority": 0,
        "response_format": {"type": "text"},
        "tools": [],
        "stop_regex": [],
        "logits_processors": [],
        "json_schema": "",
        **{name: {} for name in ("extra_body", "sampling_params", "vllm_xargs", "mm_processor_kwargs")},
        **{name: {} for name in ("structured_outputs", "custom_params")},
        "top_logprobs": 0,
        "tool_choice": "none",
        "modalities": ["text"],
        "skip_special_tokens": True,
        "user": "someone",
        "unknown": {"deep": [1, 2, {"x": None}]},
        "stop": None,
        "max_tokens": None,
        "temperature": None,
        "cache_salt": None,
        "stream": None,
    }
    assert site.http.post("/v1/completions", json={"prompt": "a", **neutral}).status_code == 200
    assert site.http.post("/v1/completions", json={"prompt": "a", "logprobs": False}).status_code == 200
    alike = {"max_tokens": 3, "max_completion_tokens": 3, "logprobs": 2, "top_logprobs": 2}
    assert site.http.post("/v1/completions", json={"prompt": "a", **alike}).status_code == 200


def test_an_unknown_model(site: Site) -> None:
    reply = site.http.post("/v1/completions", json={"prompt": SECRET, "model": "other"})
    check_refusal(reply, 404, "model_not_found", "model")
    assert reply.json()["error"]["message"].startswith("there is no model 'other'; this server serves ")
    assert reply.json()["error"]["type"] == "NotFoundError"


def test_unknown_paths_and_methods_have_the_error_shape(site: Site) -> None:
    check_refusal(site.http.get(f"/{SECRET}"), 404, "not_found", None)
    reply = site.http.get("/v1/completions")
    check_refusal(reply, 405, "method_not_allowed", None)
    assert reply.headers["Allow"] == "POST"
    check_refusal(site.http.request(SECRET, "/v1/completions"), 405, "method_not_allowed", None)
    assert site.http.delete("/health").headers["Allow"] == "GET, HEAD"


def test_a_large_body_is_refused_by_its_length_or_its_count(site: Site) -> None:
    with socket.create_connection(("127.0.0.1", site.port), timeout=LIMIT_S) as connection:
        connection.sendall(COMPLETIONS_HEAD + b"Content-Length: 100001\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    part = b"2710\r\n" + b" " * 10_000 + b"\r\n"
    with socket.create_connection(("127.0.0.1", site.port), timeout=LIMIT_S) as connection:
        connection.sendall(COMPLETIONS_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + part * 11)
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    fits = json.dumps({"prompt": "a"}).encode()
    reply = post(site, content=fits + b" " * (100_000 - len(fits)))
    assert reply.status_code == 200
