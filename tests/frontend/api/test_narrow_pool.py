"""With a pool smaller than the context, the server announces the length that a request may have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from radixkv.frontend.served_model import ServedModel
from support.running_site import site_fixture
from support.scripted_runtime import MAX_MODEL_LEN, ScriptedLoop, Site

POOL_TOKENS = 64
LIMIT = POOL_TOKENS + 1
"""Longest request: the last token of an answer needs no page."""
SHORT = f"the pool holds {POOL_TOKENS} tokens, fewer than max_model_len {MAX_MODEL_LEN}"


NARROW = msgspec.structs.replace(ScriptedLoop().ready, n_pages=4)
site = site_fixture(ready=NARROW)
site_of_eight_pages = site_fixture(ready=msgspec.structs.replace(NARROW, n_pages=8))


def test_a_request_of_the_announced_length_is_served(site: Site) -> None:
    assert site.http.get("/v1/models").json()["data"][0]["max_model_len"] == LIMIT
    assert site.http.get("/v1/models/echo").json()["max_model_len"] == LIMIT
    assert site.http.get("/model_info").json()["max_model_len"] == LIMIT
    assert site.http.post("/tokenize", json={"prompt": "a"}).json()["max_model_len"] == LIMIT
    reply = site.http.post("/v1/completions", json={"prompt": "a" * (LIMIT - 1), "max_tokens": 1})
    assert reply.status_code == 200, reply.text


def test_server_info_has_both_lengths(site: Site) -> None:
    info = site.http.get("/server_info").json()
    assert (info["max_model_len"], info["max_req_len"]) == (MAX_MODEL_LEN, LIMIT)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a" * LIMIT}),
        ("/v1/completions", {"prompt": "a" * (LIMIT + 1)}),
        ("/v1/completions", {"prompt": "a" * (LIMIT * 5 + 1)}),
        ("/v1/completions", {"prompt": [1] * (LIMIT + 1)}),
        ("/v1/completions", {"prompt": "a", "max_tokens": LIMIT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * LIMIT}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * (LIMIT + 1)}),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": LIMIT}}),
        ("/generate", {"input_ids": [1] * (LIMIT + 1)}),
        ("/cache/explain", {"prompt": "a" * (LIMIT + 1)}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_longer_request_is_refused_with_the_pool_as_reason(site: Site, path: str, body: dict[str, Any]) -> None:
    reply = site.http.post(path, json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    assert f"This model's maximum context length is {LIMIT} tokens" in error["message"]
    assert error["message"].endswith(f" ({SHORT})")
    assert error["param"] in (*body, "max_new_tokens")


def test_anthropics_error_has_the_pool_as_reason(site: Site) -> None:
    body = {"messages": [{"role": "user", "content": "a" * LIMIT}], "max_tokens": 1}
    message = site.http.post("/v1/messages", json=body).json()["error"]["message"]
    n_prompt = LIMIT + len("<user><assistant>")
    assert message == f"prompt is too long: {n_prompt} tokens > {LIMIT} maximum ({SHORT})"


@pytest.mark.parametrize(
    ("budget", "n_tokens", "end"),
    [
        (48, MAX_MODEL_LEN, f"reduce it to at most {MAX_MODEL_LEN - 1}"),
        (64, 130, "fewer than max_model_len 512; a kv_budget of at most 48 lets it be longer)"),
        (0, 130, "(the pool holds 128 tokens, fewer than max_model_len 512)"),
    ],
)
def test_the_reason_fits_the_budget(site_of_eight_pages: Site, budget: int, n_tokens: int, end: str) -> None:
    body = {"prompt": "a", "max_tokens": n_tokens, "kv_budget": budget}
    message = site_of_eight_pages.http.post("/v1/completions", json=body).json()["error"]["message"]
    assert message.endswith(end)


def test_the_operator_is_warned(served_model: ServedModel) -> None:
    assert served_model.warnings == []
    assert replace(served_model, ready=NARROW).warnings == [f"{SHORT}: longer requests are refused"]
    (line,) = replace(served_model, tokenizer=None).warnings
    assert "some/echo has no tokenizer.json" in line
    assert "--tokenizer" in line
