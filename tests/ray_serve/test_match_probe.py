"""What the Ray Serve application asks ``/cache/match`` about a client's request."""

from __future__ import annotations

import json

import pytest

from radixkv.frontend.replicas.recent_prefixes import prefixes_of
from radixkv.ray_serve.match_probe import LOAD_QUESTION, Match, match_question, read_match
from radixkv.ray_serve.messages import ForwardedRequest


def question(path, body):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return match_question(ForwardedRequest("POST", path, [], body))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/chat/completions?a=b"])
def test_bodies_that_the_probe_understands_are_asked_as_they_are(path):
    assert question(path, b'{"any": 1}').body == b'{"any": 1}'


def test_a_prompt_of_generate_is_renamed():
    assert json.loads(question("/generate", {"text": "a", "cache_salt": "s", "stream": True}).body) == {
        "prompt": "a",
        "cache_salt": "s",
    }
    assert json.loads(question("/generate", {"input_ids": [[1, 2], [3]]}).body) == {"prompt": [[1, 2], [3]]}


def test_an_adapter_of_generate_is_the_model_of_the_question():
    asked = json.loads(question("/generate", {"text": "a", "lora_path": "sql"}).body)
    assert asked == {"prompt": "a", "model": "sql"}
    for nothing in ("", None):
        assert json.loads(question("/generate", {"text": "a", "lora_path": nothing}).body) == {"prompt": "a"}


def n_shared(one, other):
    """Bytes of the prompts that count as sent before."""
    known = {prefix.digest for prefix in prefixes_of(one.prompt, one.namespace)}
    return max(
        (prefix.n_bytes for prefix in prefixes_of(other.prompt, other.namespace) if prefix.digest in known),
        default=0,
    )


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "prompt", "x" * 1000),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": "x" * 1000}]),
        ("/generate", "text", "x" * 1000),
    ],
)
def test_prompts_count_as_sent_before_by_their_own_bytes_and_the_namespace(path, field, value):
    """Whatever else a body has, before or behind the prompt."""
    one = question(path, {field: value})
    name = "lora_path" if path == "/generate" else "model"
    assert n_shared(one, question(path, {"stream": True, field: value, "rid": "a"})) > 900
    assert n_shared(one, question(path, {field: value, name: "sql"})) == 0
    assert n_shared(one, question(path, {field: value, "cache_salt": "s"})) == 0
    adapted = question(path, {name: "sql", field: value})
    assert n_shared(adapted, question(path, {field: value, "stream": False, name: "sql"})) > 900


def test_tools_stand_before_messages():
    chat = {"messages": [{"role": "user", "content": "x" * 1000}], "model": "m"}
    tools = [{"type": "function", "function": {"name": "find"}}]
    assert (
        n_shared(question("/v1/chat/completions", chat), question("/v1/chat/completions", chat | {"tools": tools}))
        == 0
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *[
            ("/generate", b"{"),
            ("/generate", {"text": 5}),
            ("/generate", {}),
            ("/v1/messages", {}),
            ("/v1/models", b""),
        ],
        ("/generate", {"text": ["a", "b"], "lora_path": ["sql", None]}),
        *[("/v1/completions", b"{"), ("/v1/completions", {"model": 5})],
    ],
)
def test_only_the_load_is_asked_for_without_a_prompt(path, body):
    assert question(path, body) == LOAD_QUESTION
    assert prefixes_of(LOAD_QUESTION.prompt, LOAD_QUESTION.namespace) == []


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
