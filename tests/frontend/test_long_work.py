"""Long bodies and replies are parsed and made beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from scripted import Site
from starlette.requests import Request

from radixkv.frontend.choice import Piece
from radixkv.frontend.http.bodies import Bodies
from radixkv.frontend.openai.completion import CompletionShape
from radixkv.frontend.scored import ScoredPrompt
from support.live import LIMIT_S


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
