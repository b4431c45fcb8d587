"""OpenAI's ``prediction`` of chats: its tokens reach the runtime where drafts are on."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.wire.messages import unpack_tokens
from support.running_site import site_fixture
from support.scripted_runtime import DRAFTS, MAX_MODEL_LEN, ScriptedLoop, Site
from support.site_requests import post

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
TEXT = "def f(x):\n    return x, [1, 2]\n"
PARTS = [{"type": "text", "text": TEXT[:7]}, {"type": "text", "text": TEXT[7:]}]
drafting = site_fixture(ready=ScriptedLoop(drafts=DRAFTS).ready)


def sent(site: Site, prediction: Any) -> bytes:
    """Returns the tokens of a prediction that reach the runtime."""
    post(site, PATH, messages=MESSAGES, max_tokens=2, prediction=prediction)
    return site.loop.submitted[-1].prediction


@pytest.mark.parametrize("content", [TEXT, PARTS])
def test_a_prediction_is_tokenized_without_special_tokens(drafting: Site, content: Any) -> None:
    body = {"prompt": TEXT, "add_special_tokens": False}
    expected = post(drafting, "/tokenize", **body)["tokens"]
    assert unpack_tokens(sent(drafting, {"type": "content", "content": content})) == expected


@pytest.mark.parametrize(
    "prediction", [None, {"type": "content", "content": ""}, {"type": "content", "content": []}]
)
def test_an_empty_prediction_is_none(drafting: Site, prediction: Any) -> None:
    assert sent(drafting, prediction) == b""


def test_without_drafts_a_prediction_has_no_effect(site: Site) -> None:
    assert sent(site, {"type": "content", "content": TEXT}) == b""
    assert sent(site, {"type": "content", "content": TEXT * MAX_MODEL_LEN}) == b""


@pytest.mark.parametrize(
    "prediction",
    [
        "text",
        {"content": TEXT},
        {"type": "content"},
        {"type": "text", "content": TEXT},
        {"type": "content", "content": 5},
        {"type": "content", "content": [TEXT]},
        {"type": "content", "content": [{"type": "image_url", "text": TEXT}]},
        {"type": "content", "content": [{"type": "text"}]},
    ],
)
def test_a_wrong_prediction_is_refused(site: Site, drafting: Site, prediction: Any) -> None:
    for one in (site, drafting):
        reply = one.http.post(PATH, json={"messages": MESSAGES, "prediction": prediction})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "prediction"


def test_a_prediction_longer_than_the_context_is_refused(drafting: Site) -> None:
    prediction = {"type": "content", "content": "é" * (MAX_MODEL_LEN + 1)}
    reply = drafting.http.post(PATH, json={"messages": MESSAGES, "prediction": prediction})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prediction")
    assert "the prediction" in error["message"]
