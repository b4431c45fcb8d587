"""Beam search and many choices on a real server."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from radixkv import LLM, BeamSearchParams
from support.live import LiveServer

pytestmark = pytest.mark.nightly

PROMPT = [5, 6, 7, 8, 9, 10]


def test_the_choices_are_the_beams_of_the_library(checked_server: LiveServer, sensitive: Path) -> None:
    whole = checked_server.complete(
        prompt=PROMPT, n=5, use_beam_search=True, length_penalty=0.5, max_tokens=12, return_token_ids=True
    )
    llm = LLM(sensitive, device="cpu", max_total_tokens=1024, max_model_len=256)
    (output,) = llm.beam_search([PROMPT], BeamSearchParams(5, 12, length_penalty=0.5))
    llm.shutdown()
    found = [(PROMPT + choice["token_ids"], choice["finish_reason"]) for choice in whole["choices"]]
    assert found == [(one.tokens, one.finish_reason) for one in output.sequences]
    assert whole["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])


def test_chats_are_searched_too(checked_server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "n": 3, "use_beam_search": True, "max_tokens": 8}
    reply = checked_server.http.post("/v1/chat/completions", json=body).json()
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    assert len(set(texts)) == 3
    again = checked_server.http.post("/v1/chat/completions", json={**body, "temperature": 0.7}).json()
    assert [choice["message"]["content"] for choice in again["choices"]] == texts


def test_64_choices_are_sampled(checked_server: LiveServer) -> None:
    whole = checked_server.complete(prompt=PROMPT, n=64, max_tokens=4, seed=3, return_token_ids=True)
    single = checked_server.complete(prompt=PROMPT, max_tokens=4, seed=3 + 63, return_token_ids=True)
    assert len(whole["choices"]) == 64
    assert whole["choices"][63]["token_ids"] == single["choices"][0]["token_ids"]


def test_a_search_ends_when_its_client_leaves(checked_server: LiveServer) -> None:
    body = {"prompt": PROMPT, "n": 8, "use_beam_search": True, "max_tokens": 200, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        checked_server.http.post("/v1/completions", json=body, timeout=0.2)
