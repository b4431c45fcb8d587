"""What errors tell the people who read them: the field, what it is, what it must be, and what to do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.scripted_runtime import Site

WRONG: list[tuple[str, Any, str]] = [
    ("/v1/completions", [], "the body is a list; it must be an object"),
    ("/v1/completions", {}, "prompt is missing; give it"),
    ("/v1/completions", {"prompt": 5}, "prompt is a whole number; it must be a string or a list"),
    ("/v1/completions", {"prompt": "a", "n": "2"}, "n is a string; it must be a whole number or null"),
    ("/v1/completions", {"prompt": "a", "stream": 1}, "stream is a whole number; it must be true or false or null"),
    (
        "/v1/completions",
        {"prompt": [1.5]},
        "prompt[0] is a number; it must be a whole number or a string or a list",
    ),
    (
        "/v1/completions",
        {"prompt": "a", "logit_bias": {"a": 1}},
        "a key of logit_bias is a string; it must be a whole number",
    ),
    (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 10**30},
        "max_tokens must be a whole number <= 9223372036854775807",
    ),
    ("/v1/chat/completions", {"messages": "hi"}, "messages is a string; it must be a list"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 0},
        "max_completion_tokens must be a whole number >= 1",
    ),
    ("/generate", {"text": 5}, "text is a whole number; it must be a string or a list or null"),
    ("/detokenize", {"tokens": "a"}, "tokens is a string; it must be a list"),
]


@pytest.mark.parametrize(("path", "body", "text"), WRONG, ids=lambda value: json.dumps(value)[:50])
def test_a_wrong_type_is_told_in_the_words_of_json(site: Site, path: str, body: Any, text: str) -> None:
    reply = site.http.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, text)


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/completions", '{"prompt": "a", "temperature": 1e999}', "temperature is a number out of range"),
        (
            "/v1/completions",
            '{"prompt": "a", "logit_bias": {"5": -1e999}}',
            "logit_bias[...] is a number out of range",
        ),
        ("/v1/completions", f'{{"prompt": "a", "n": {"9" * 5000}}}', "n is a number out of range"),
        ("/v1/completions", "1e999", "the body is a number out of range"),
        ("/generate", '{"text": "a", "sampling_params": {"top_p": 1e999}}', "top_p is a number out of range"),
    ],
    ids=lambda value: value[:50],
)
def test_a_number_that_is_none_of_a_computers(site: Site, path: str, body: str, text: str) -> None:
    reply = site.http.post(path, content=body, headers={"Content-Type": "application/json"})
    message = f"{text}; it must be between -1e308 and 1e308"
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, message)


@pytest.mark.parametrize(
    ("path", "body", "advice"),
    [
        ("/generate", {"text": "a", "extra_key": "tenant"}, "use cache_salt"),
        ("/v1/completions", {"prompt": "a", "extra_key": "tenant"}, "use cache_salt"),
        ("/v1/completions", {"prompt": "a", "best_of": 2}, "set n to the same, or leave it out"),
        ("/v1/completions", {"prompt": "a", "min_new_tokens": 2}, "use min_tokens"),
        ("/v1/completions", {"prompt": "a", "no_stop_trim": True}, "use include_stop_str_in_output"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "leave it out"),
        ("/v1/completions", {"prompt": "a", "max_new_tokens": 2}, "use max_tokens"),
        ("/v1/chat/completions", {"messages": [], "max_token": 2}, "use max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_completion_tokens": 2}, "use max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "max_completion_tokens": 3}, "use max_tokens"),
        ("/v1/completions", {"prompt": "a", "top_logprobs": 2}, "use logprobs"),
        ("/v1/completions", {"prompt": "a", "sampling_params": {"n": 2}}, "give its fields beside the others"),
        ("/v1/completions", {"prompt": "a", "extra_body": {"top_k": 2}}, "give its fields beside the others"),
        (
            "/generate",
            {"text": "a", "sampling_params": {"logprobs": 0}},
            "use return_logprob and top_logprobs_num",
        ),
    ],
)
def test_a_field_that_another_stands_for_names_it(site: Site, path: str, body: Any, advice: str) -> None:
    message = site.http.post(path, json=body).json()["error"]["message"]
    assert message.endswith(f" is not supported in this release; {advice}")


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("max_tokens", 2, "max_new_tokens"),
        ("max_completion_tokens", 2, "max_new_tokens"),
        ("min_tokens", 2, "min_new_tokens"),
        ("include_stop_str_in_output", True, "no_stop_trim"),
    ],
)
def test_the_field_to_use_stands_in_sampling_params(site: Site, name: str, value: Any, instead: str) -> None:
    for body in ({name: value}, {"sampling_params": {name: value}}):
        error = site.http.post("/generate", json={"text": "a", **body}).json()["error"]
        assert error["param"] == name
        assert error["message"].endswith(f"; use {instead} in sampling_params")
    granted = {"text": "a", "sampling_params": {instead: value}}
    assert site.http.post("/generate", json=granted).status_code == 200


@pytest.mark.parametrize(("name", "value"), [("max_new_tokens", 2), ("temperature", 0), ("stop", ["a"]), ("n", 2)])
def test_a_field_of_sampling_params_is_not_ignored_beside_it(site: Site, name: str, value: Any) -> None:
    error = site.http.post("/generate", json={"text": "a", name: value}).json()["error"]
    assert error["message"] == f"{name} is a field of sampling_params; give it there"
    assert error["param"] == name
    assert site.http.post("/generate", json={"text": "a", name: None}).status_code == 200


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("stop", ["", []]),
        ("regex", [""]),
        ("n", [1]),
        ("min_tokens", [0]),
        ("min_new_tokens", [0]),
        ("presence_penalty", [0, 0.0]),
        ("logprobs", [False]),
        ("no_stop_trim", [False]),
        ("include_stop_str_in_output", [False]),
        ("skip_special_tokens", [True]),
        ("spaces_between_special_tokens", [True]),
        ("custom_params", [{}]),
    ],
)
def test_what_asks_for_nothing_may_stand_beside_it(site: Site, name: str, values: list[Any]) -> None:
    for value in values:
        reply = site.http.post("/generate", json={"text": "a", name: value})
        assert reply.status_code == 200, reply.text


def test_a_truth_is_shown_as_in_json(site: Site) -> None:
    error = site.http.post("/v1/completions", json={"prompt": "a", "use_beam_search": True}).json()["error"]
    assert error["message"] == "use_beam_search true is not supported in this release; leave it out"


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_an_empty_body_is_called_so(site: Site, body: bytes) -> None:
    reply = site.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert reply.json()["error"]["message"] == "the body is empty; send the request as JSON"


def test_a_path_without_v1_says_where_openais_are(site: Site) -> None:
    reply = site.http.post("/chat/completions", json={})
    assert reply.status_code == 404
    assert "/v1/chat/completions" in reply.json()["error"]["message"]


def test_a_wrong_method_says_the_right_one(site: Site) -> None:
    for path, method, allowed in (("/v1/completions", "GET", "POST"), ("/flush_cache", "PUT", "GET, POST")):
        reply = site.http.request(method, path)
        message = f"this path does not take {method}; use {allowed}"
        assert (reply.status_code, reply.json()["error"]["message"]) == (405, message)
        assert reply.headers["allow"] == allowed


def test_what_is_not_built_says_what_there_is(site: Site) -> None:
    error = site.http.post("/v1/embeddings", json={}).json()["error"]
    assert error["code"] == "unsupported_feature"
    assert error["message"].startswith("/v1/embeddings is not supported in this release")
    assert "/v1/completions" in error["message"]


def test_a_body_that_is_too_long_says_the_flag(site: Site) -> None:
    reply = site.http.post("/v1/completions", json={"prompt": "a" * (9 << 20)})
    assert reply.status_code == 413
    assert "--max-body-bytes" in reply.json()["error"]["message"]
