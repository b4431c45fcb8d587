"""Long bodies are parsed, and long responses rendered, off the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from radixkv.errors import InvalidRequest
from radixkv.frontend.api.openai import schema
from radixkv.frontend.api.openai.completion_format import CompletionFormat
from radixkv.frontend.api.openai.prompt_logprobs import PromptWithLogprobs
from radixkv.frontend.http.body import BodyReader
from radixkv.frontend.http.body_decoder import MAX_KEYS
from radixkv.frontend.served_model import ServedModel
from radixkv.text.chat_template import ChatTemplate
from support.live import LIMIT_S
from support.running_site import running_site
from support.scripted_runtime import Site


def test_the_loop_runs_while_a_long_body_is_parsed() -> None:
    body = b" " * 70_000
    released = threading.Event()

    def parse(found: bytes, most: int, misspelt: dict[str, str]) -> tuple[int, int]:
        assert released.wait(timeout=LIMIT_S), "the event loop waited for the parser"
        return len(found), most

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def ask() -> tuple[int, int]:
        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        asyncio.get_running_loop().call_later(0.01, released.set)
        return await BodyReader(100_000).read(Request(scope, receive), parse, 7)

    assert asyncio.run(ask()) == (70_000, 7)


KEYS = b",".join(b'"%x" \n: 1' % number for number in range(MAX_KEYS))


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", %b}' % KEYS,
        b'{"prompt": "a", %b}' % b",".join([b'"n": 1'] * MAX_KEYS),
        b'{"prompt": "a", %b}' % KEYS.replace(b'" \n', rb'\\" '),
        b'{"prompt": "a", "unknown": {%b}}' % KEYS,
        b'{"prompt": "a", "messages": [{%b}]}' % KEYS,
    ],
    ids=["unknown", "repeated", "backslashes", "below an unknown one", "of a message"],
)
def test_a_body_with_too_many_keys_is_not_decoded(body: bytes) -> None:
    for parse in (schema.parse_completion, schema.parse_chat):
        for content in (body, body[:-1]):  # the second one cannot be decoded
            with pytest.raises(InvalidRequest, match=rf"have \d+ keys; at most {MAX_KEYS} a request"):
                parse(content, 1 << 20)


def test_colons_in_texts_do_not_count_as_keys() -> None:
    text = '{"a": 1, "b" : "\\\\"}' * MAX_KEYS
    assert schema.parse_completion(json.dumps({"prompt": text}).encode(), 1 << 20).prompt == text
    messages = [{"role": "user", "content": text}]
    assert schema.parse_chat(json.dumps({"messages": messages}).encode(), 1 << 20).messages == messages
    just_fits = b'{"prompt": "a", %b}' % KEYS.partition(b",")[2]
    assert schema.parse_completion(just_fits, 1 << 20).prompt == "a"


def record_where(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[bool]:
    """Returns a list to which each call of a method appends whether it is in the thread of an event loop."""
    method, in_loop = getattr(owner, name), list[bool]()

    def recorded(*arguments: Any, **options: Any) -> Any:
        in_loop.append(asyncio._get_running_loop() is not None)
        return method(*arguments, **options)

    monkeypatch.setattr(owner, name, recorded)
    return in_loop


def test_a_long_response_is_rendered_in_a_thread(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    in_loop = record_where(monkeypatch, CompletionFormat, "whole")
    body = {"prompt": "a" * 100, "max_tokens": 1, "echo": True, "logprobs": 1}
    reply = site.http.post("/v1/completions", json=body)
    assert len(reply.json()["choices"][0]["logprobs"]["tokens"]) == 101
    body = {"prompt": ["a" * 100] * 64, "max_tokens": 1, "return_token_ids": True}
    reply = site.http.post("/v1/completions", json=body)
    assert [len(choice["prompt_token_ids"]) for choice in reply.json()["choices"]] == [100] * 64
    site.http.post("/v1/completions", json={**body, "prompt": "a"}).raise_for_status()
    assert in_loop == [False, False, True]


def test_many_prompt_logprobs_are_rendered_in_a_thread(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    in_loop = record_where(monkeypatch, PromptWithLogprobs, "absorb_prompt_logprobs")
    for n_tokens, is_inline in ((21, True), (81, False)):  # the runtime sends 40 at a time
        in_loop.clear()
        body = {"prompt": "a" * n_tokens, "max_tokens": 1, "prompt_logprobs": 1}
        reply = site.http.post("/v1/completions", json=body)
        assert len(reply.json()["choices"][0]["prompt_logprobs"]) == n_tokens
        assert set(in_loop) == {is_inline}


def test_a_slow_template_does_not_hold_up_the_event_loop(
    served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_loop = record_where(monkeypatch, ChatTemplate, "render")
    template = ChatTemplate("{% for i in range(n) %}{% endfor %}{{ 'a' * n * size }}", {}, "the test")
    with running_site(replace(served_model, chat_template=template), tmp_path) as site:
        for variables, status, expected in (
            ({"n": 1, "size": 1}, 200, [True]),
            ({"n": 50_000, "size": 0.0}, 400, [True, False]),
            ({"n": 1, "size": 10**10}, 400, [True, False]),
        ):
            in_loop.clear()
            body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": variables}
            assert site.http.post("/v1/chat/completions", json=body).status_code == status
            assert in_loop == expected
