"""Error texts name the field, its value, what it must be, and what to do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.scripted_runtime import Site
from support.site_requests import post_bytes

CHAT = {"messages": [{"role": "user", "content": "a"}]}
WHOLE, STRING, LIST = "whole number", "string", "list"


@pytest.mark.parametrize(
    ("path", "body", "field", "found", "allowed"),
    [
        ("/v1/completions", [], "body", LIST, ["object"]),
        ("/v1/completions", {"prompt": 5}, "prompt", WHOLE, [STRING, LIST]),
        ("/v1/completions", {"prompt": "a", "n": "2"}, "n", STRING, [WHOLE, "null"]),
        ("/v1/completions", {"prompt": "a", "stream": 1}, "stream", WHOLE, ["true", "false", "null"]),
        ("/v1/completions", {"prompt": [1.5]}, "prompt[0]", "number", [WHOLE, STRING, LIST]),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias", STRING, [WHOLE]),
        ("/v1/chat/completions", {"messages": "hi"}, "messages", STRING, [LIST]),
        ("/generate", {"text": 5}, "text", WHOLE, [STRING, LIST, "null"]),
        ("/detokenize", {"tokens": "a"}, "tokens", STRING, [LIST]),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_a_wrong_type_is_described_in_json_terms(
    site: Site, path: str, body: Any, field: str, found: str, allowed: list[str]
) -> None:
    reply = site.http.post(path, json=body)
    assert reply.status_code == 400
    what, _, must = reply.json()["error"]["message"].partition(";")
    assert field in what
    assert found in what
    assert all(kind in must for kind in allowed)


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/v1/completions", {}, ["prompt"]),
        ("/v1/completions", {"prompt": "a", "max_tokens": 10**30}, ["max_tokens", f"<= {2**63 - 1}"]),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 0}, ["max_completion_tokens", ">= 1"]),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_a_missing_field_and_a_limit_are_named(site: Site, path: str, body: Any, names: list[str]) -> None:
    reply = site.http.post(path, json=body)
    assert reply.status_code == 400
    assert all(name in reply.json()["error"]["message"] for name in names)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", '{"prompt": "a", "temperature": 1e999}', "temperature"),
        ("/v1/completions", '{"prompt": "a", "logit_bias": {"5": -1e999}}', "logit_bias[...]"),
        ("/v1/completions", f'{{"prompt": "a", "n": {"9" * 5000}}}', "n"),
        ("/v1/completions", "1e999", "the body"),
        ("/generate", '{"text": "a", "sampling_params": {"top_p": 1e999}}', "top_p"),
    ],
    ids=lambda value: value[:50],
)
def test_a_number_out_of_range_is_refused(site: Site, path: str, body: str, field: str) -> None:
    reply = post_bytes(site, path, body)
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert message.startswith(f"{field} ")
    assert "-1e308" in message


@pytest.mark.parametrize(
    ("path", "body", "instead"),
    [
        ("/generate", {"text": "a", "extra_key": "tenant"}, "cache_salt"),
        ("/v1/completions", {"prompt": "a", "extra_key": "tenant"}, "cache_salt"),
        ("/v1/completions", {"prompt": "a", "best_of": 2}, " n "),
        ("/v1/completions", {"prompt": "a", "min_new_tokens": 2}, "min_tokens"),
        ("/v1/completions", {"prompt": "a", "no_stop_trim": True}, "include_stop_str_in_output"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "leave it out"),
        ("/v1/completions", {"prompt": "a", "max_new_tokens": 2}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [], "max_token": 2}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_completion_tokens": 2}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "top_logprobs": 2}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "sampling_params": {"n": 2}}, "fields"),
        ("/v1/completions", {"prompt": "a", "extra_body": {"top_k": 2}}, "fields"),
        ("/generate", {"text": "a", "sampling_params": {"logprobs": 0}}, "return_logprob"),
    ],
)
def test_a_field_with_an_equivalent_names_it(site: Site, path: str, body: Any, instead: str) -> None:
    error = site.http.post(path, json=body).json()["error"]
    assert error["code"] == "unsupported_feature"
    assert instead in error["message"].partition("; ")[2]


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("max_tokens", 2, "max_new_tokens"),
        ("max_completion_tokens", 2, "max_new_tokens"),
        ("min_tokens", 2, "min_new_tokens"),
        ("include_stop_str_in_output", True, "no_stop_trim"),
    ],
)
def test_the_equivalent_may_be_in_sampling_params(site: Site, name: str, value: Any, instead: str) -> None:
    for body in ({name: value}, {"sampling_params": {name: value}}):
        error = site.http.post("/generate", json={"text": "a", **body}).json()["error"]
        assert error["param"] == name
        assert f"{instead} in sampling_params" in error["message"]
    granted = {"text": "a", "sampling_params": {instead: value}}
    assert site.http.post("/generate", json=granted).status_code == 200


@pytest.mark.parametrize(("name", "value"), [("max_new_tokens", 2), ("temperature", 0), ("stop", ["a"]), ("n", 2)])
def test_a_field_of_sampling_params_is_refused_at_the_top_level(site: Site, name: str, value: Any) -> None:
    error = site.http.post("/generate", json={"text": "a", name: value}).json()["error"]
    assert "sampling_params" in error["message"]
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
def test_neutral_values_are_accepted_at_the_top_level(site: Site, name: str, values: list[Any]) -> None:
    for value in values:
        reply = site.http.post("/generate", json={"text": "a", name: value})
        assert reply.status_code == 200, reply.text


def test_a_boolean_is_shown_as_in_json(site: Site) -> None:
    error = site.http.post("/v1/completions", json={"prompt": "a", "return_hidden_states": True}).json()["error"]
    assert error["message"].startswith("return_hidden_states true ")


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_an_empty_body_is_described_as_empty(site: Site, body: bytes) -> None:
    reply = post_bytes(site, "/v1/completions", body)
    assert "empty" in reply.json()["error"]["message"]


def test_an_unknown_path_points_to_v1(site: Site) -> None:
    reply = site.http.post("/chat/completions", json={})
    assert reply.status_code == 404
    assert "/v1/chat/completions" in reply.json()["error"]["message"]


def test_a_wrong_method_names_the_right_one(site: Site) -> None:
    for path, method, allowed in (("/v1/completions", "GET", "POST"), ("/flush_cache", "PUT", "GET, POST")):
        reply = site.http.request(method, path)
        assert reply.status_code == 405
        message = reply.json()["error"]["message"]
        assert allowed in message
        assert method not in message.replace(allowed, "")
        assert reply.headers["allow"] == allowed


def test_a_body_that_is_too_long_names_the_flag(site: Site) -> None:
    reply = site.http.post("/v1/completions", json={"prompt": "a" * (9 << 20)})
    assert reply.status_code == 413
    assert "--max-body-bytes" in reply.json()["error"]["message"]
