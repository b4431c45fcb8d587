"""The limits of each parameter are accepted, and the values next to them are refused by its name."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from support.scripted_runtime import VOCAB_SIZE, Site
from support.site_requests import check_refusal

ENDPOINTS = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}

RIGHT: list[dict[str, Any]] = [
    {"n": 1},
    {"n": 64},
    {"n": 2, "best_of": 2},
    {"n": 2, "best_of": 1},
    {"max_tokens": 1},
    {"min_tokens": 0},
    {"min_tokens": 4, "max_tokens": 4},
    {"temperature": 0},
    {"temperature": 100},
    {"top_p": 1e-6},
    {"top_p": 1},
    {"top_k": -1},
    {"top_k": (1 << 31) - 1},
    {"min_p": 0},
    {"min_p": 1},
    {"presence_penalty": -2},
    {"presence_penalty": 2},
    {"frequency_penalty": -2},
    {"frequency_penalty": 2},
    {"repetition_penalty": 1e-3},
    {"repetition_penalty": 100},
    {"logit_bias": {"0": -100, str(VOCAB_SIZE - 1): 100}},
    {"logit_bias": {str(token): 1 for token in range(VOCAB_SIZE)}},
    {"seed": -(1 << 63)},
    {"seed": (1 << 63) - 1},
    {"stop": ["zyx"] * 16},
    {"stop": "z" * 64},
    {"stop": []},
    {"stop_token_ids": [VOCAB_SIZE - 1] * 64},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": 20},
    {"priority": -(1 << 31)},
    {"priority": (1 << 31) - 1},
    {"cache_salt": "é" * 64},
    {"session_id": "é" * 64},
    {"tool_choice": "none"},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "any", "schema": {}, "strict": True}}},
    {"structured_outputs": {"choice": ["a", ""]}},
    {"structured_outputs": {"regex": "a", "backend": "auto", "disable_any_whitespace": True}},
    {"guided_json": {}, "guided_choice": []},
    {"user": "someone"},
]

WRONG: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": 0}),
    ("n", {"n": 65}),
    ("best_of", {"n": 2, "best_of": 3}),
    ("best_of", {"best_of": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": -(1 << 31)}),
    ("max_tokens", {"max_tokens": 1 << 31}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
    ("temperature", {"temperature": -1e-9}),
    ("temperature", {"temperature": 100.01}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.0001}),
    ("top_k", {"top_k": -2}),
    ("top_k", {"top_k": 1 << 31}),
    ("min_p", {"min_p": -1e-9}),
    ("min_p", {"min_p": 1.0001}),
    ("presence_penalty", {"presence_penalty": -2.01}),
    ("presence_penalty", {"presence_penalty": 2.01}),
    ("frequency_penalty", {"frequency_penalty": -2.01}),
    ("frequency_penalty", {"frequency_penalty": 2.01}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("repetition_penalty", {"repetition_penalty": 100.01}),
    ("logit_bias", {"logit_bias": {"5": -100.01}}),
    ("logit_bias", {"logit_bias": {"5": 100.01}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}),
    ("logit_bias", {"logit_bias": {str(VOCAB_SIZE): 1}}),
    ("logit_bias", {"logit_bias": {str(1 << 70): 1}}),
    ("seed", {"seed": -(1 << 63) - 1}),
    ("seed", {"seed": 1 << 63}),
    ("stop", {"stop": ["z"] * 17}),
    ("stop", {"stop": "z" * 65}),
    ("stop", {"stop": [""]}),
    ("stop_token_ids", {"stop_token_ids": [1] * 65}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("stop_token_ids", {"stop_token_ids": [VOCAB_SIZE]}),
    ("prompt_logprobs", {"prompt_logprobs": -1}),
    ("prompt_logprobs", {"prompt_logprobs": 21}),
    ("priority", {"priority": -(1 << 31) - 1}),
    ("priority", {"priority": 1 << 31}),
    ("priority", {"priority": 1 << 63}),
    ("cache_salt", {"cache_salt": "é" * 64 + "x"}),
    ("session_id", {"session_id": "é" * 64 + "x"}),
    ("tool_choice", {"tool_choice": "required"}),
    ("response_format", {"response_format": {"type": "xml"}}),
    ("response_format", {"response_format": {"type": ["text"]}}),
    ("response_format", {"response_format": {"json_schema": {}}}),
    ("response_format", {"response_format": {"type": "json_schema"}}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}}),
    ("response_format", {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}),
    ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
    ("structured_outputs", {"structured_outputs": {"regex": 3}}),
    ("structured_outputs", {"structured_outputs": {"choice": ["a", 3]}}),
    ("structured_outputs", {"structured_outputs": {"choice": "a"}}),
    ("structured_outputs", {"structured_outputs": {"json": ["a"]}}),
    ("structured_outputs", {"structured_outputs": {"json_object": "yes"}}),
    ("structured_outputs", {"structured_outputs": {"schema": "a"}}),
    ("structured_outputs", {"structured_outputs": "a"}),
    ("structured_outputs", {"structured_outputs": {"regex": "a" * (1 << 16)}}),
    ("guided_regex", {"guided_json": {}, "guided_regex": "a"}),
    ("guided_choice", {"guided_choice": "a"}),
]


def post(site: Site, path: str, **body: Any) -> httpx.Response:
    return site.http.post(path, json={**ENDPOINTS[path], "max_tokens": 9, **body})


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("body", RIGHT, ids=lambda body: str(body)[:40])
def test_the_last_valid_value_is_accepted(site: Site, path: str, body: dict[str, Any]) -> None:
    reply = post(site, path, **body)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(("param", "body"), WRONG, ids=lambda value: str(value)[:40])
def test_the_first_invalid_value_is_refused_by_name(
    site: Site, path: str, param: str, body: dict[str, Any]
) -> None:
    reply = post(site, path, **body)
    code = reply.json()["error"]["code"]
    assert code == "invalid_request" or param in ("best_of", "tool_choice", "structured_outputs")
    assert param in check_refusal(reply, param, code)
    assert len(reply.content) < 500
    canary = site.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 7})
    assert canary.json()["choices"][0]["text"] == "hellohe"


@pytest.mark.parametrize(("value", "is_right"), [(0, True), (20, True), (-1, False), (21, False), (1.5, False)])
def test_logprobs_of_completions(site: Site, value: Any, is_right: bool) -> None:
    reply = post(site, "/v1/completions", logprobs=value)
    assert reply.status_code == (200 if is_right else 400)
    assert is_right or reply.json()["error"]["param"] == "logprobs"


@pytest.mark.parametrize(("value", "is_right"), [(0, True), (20, True), (-1, False), (21, False), (1.5, False)])
def test_top_logprobs_of_chat(site: Site, value: Any, is_right: bool) -> None:
    reply = post(site, "/v1/chat/completions", logprobs=True, top_logprobs=value)
    assert reply.status_code == (200 if is_right else 400)
    assert is_right or reply.json()["error"]["param"] == "top_logprobs"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
@pytest.mark.parametrize("value", [-1, 1 << 31])
def test_the_refusal_of_max_tokens_says_that_0_is_allowed(site: Site, path: str, value: int) -> None:
    of_generate = {"text": "x", "sampling_params": {"max_new_tokens": value}}
    reply = site.http.post(path, json=of_generate) if path == "/generate" else post(site, path, max_tokens=value)
    name = "max_new_tokens" if path == "/generate" else "max_tokens"
    assert reply.status_code == 400
    assert f"{name} is {value}; it must be between 0, which only computes the prompt, and 2147483647" in reply.text
