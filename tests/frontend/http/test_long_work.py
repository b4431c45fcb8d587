"""Long bodies and replies are parsed and made beside the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.requests import Request

from radixkv.errors import InvalidRequest
from radixkv.frontend.api.openai import schema
from radixkv.frontend.api.openai.completion import CompletionShape
from radixkv.frontend.choice_stream import Piece
from radixkv.frontend.http.body import Bodies
from radixkv.frontend.http.body_decoder import MAX_KEYS
from radixkv.frontend.prompt_logprobs import ScoredPrompt
from support.live import LIMIT_S
from support.scripted_runtime import Site


def test_other_work_goes_on_while_a_long_body_is_parsed() -> None:
    body = b" " * 70_000
    released = threading.Event()

    def parse(found: bytes, most: int) -> tuple[int, int]:
        assert released.wait(timeout=LIMIT_S), "the event loop waited for the parser"
        return len(found), most

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def ask() -> tuple[int, int]:
        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        asyncio.get_running_loop().call_later(0.01, released.set)
        return await Bodies(100_000).read(Request(scope, receive), parse, 7)

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
def test_more_keys_than_a_request_has_are_not_looked_at(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for decoder in (schema._completions, schema._chats):
        monkeypatch.setattr(decoder, "_fields", None)
    for parse in (schema.parse_completion, schema.parse_chat):
        with pytest.raises(InvalidRequest, match=rf"have \d+ keys; at most {MAX_KEYS} a request"):
            parse(body, 1 << 20)


def test_colons_in_texts_are_no_keys() -> None:
    text = '{"a": 1, "b" : "\\\\"}' * MAX_KEYS
    assert schema.parse_completion(json.dumps({"prompt": text}).encode(), 1 << 20).prompt == text
    messages = [{"role": "user", "content": text}]
    assert schema.parse_chat(json.dumps({"messages": messages}).encode(), 1 << 20).messages == messages
    just_fits = b'{"prompt": "a", %b}' % KEYS.partition(b",")[2]
    assert schema.parse_completion(just_fits, 1 << 20).prompt == "a"


def test_a_long_reply_is_worded_beside_the_loop(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = CompletionShape.whole
    in_loop: list[bool] = []

    def recorded(
        shape: CompletionShape, pieces: Sequence[Piece], prompts: Sequence[ScoredPrompt]
    ) -> dict[str, Any]:
        in_loop.append(_is_in_a_loop())
        return whole(shape, pieces, prompts)

    monkeypatch.setattr(CompletionShape, "whole", recorded)
    body = {"prompt": "a" * 100, "max_tokens": 1, "echo": True, "logprobs": 1}
    reply = site.http.post("/v1/completions", json=body)
    assert len(reply.json()["choices"][0]["logprobs"]["tokens"]) == 101
    body = {"prompt": ["a" * 100] * 64, "max_tokens": 1, "return_token_ids": True}
    reply = site.http.post("/v1/completions", json=body)
    assert [len(choice["prompt_token_ids"]) for choice in reply.json()["choices"]] == [100] * 64
    site.http.post("/v1/completions", json={**body, "prompt": "a"}).raise_for_status()
    assert in_loop == [False, False, True]


def _is_in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
