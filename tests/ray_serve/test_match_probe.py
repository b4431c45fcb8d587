"""What the Ray Serve application asks ``/cache/match`` about a client's request."""

from __future__ import annotations

import json

import pytest

from radixkv.ray_serve.match_probe import Match, match_question, read_match
from radixkv.ray_serve.messages import ForwardedRequest


def question(path, body):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return match_question(ForwardedRequest("POST", path, [], body))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/chat/completions?a=b"])
def test_bodies_that_the_probe_understands_are_asked_as_they_are(path):
    assert question(path, b'{"any": 1}') == b'{"any": 1}'


def test_a_prompt_of_generate_is_renamed():
    assert json.loads(question("/generate", {"text": "a", "cache_salt": "s", "stream": True})) == {
        "prompt": "a",
        "cache_salt": "s",
    }
    assert json.loads(question("/generate", {"input_ids": [[1, 2], [3]]})) == {"prompt": [[1, 2], [3]]}


def test_an_adapter_of_generate_is_the_model_of_the_question():
    asked = json.loads(question("/generate", {"text": "a", "lora_path": "sql"}))
    assert asked == {"prompt": "a", "model": "sql"}
    for nothing in ("", None):
        assert json.loads(question("/generate", {"text": "a", "lora_path": nothing})) == {"prompt": "a"}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/generate", b"{"), ("/generate", {"text": 5}), ("/generate", {}), ("/v1/messages", {}), ("/v1/models", b"")],
)
def test_nothing_is_asked_without_a_prompt(path, body):
    assert question(path, body) is None


def test_several_prompts_and_tiers_are_added_up():
    reply = {
        "page_size": 16,
        "prompts": [
            {"prompt_tokens": 97, "matched_tokens": {"device": 48, "host": 32}},
            {"prompt_tokens": 3, "matched_tokens": {"device": 0, "host": 0, "storage": 0}},
        ],
        "load": {"running": 3, "waiting": 1, "pages": 4096},
    }
    assert read_match(json.dumps(reply).encode()) == Match(n_tokens=100, n_matched=80, n_in_flight=4)
