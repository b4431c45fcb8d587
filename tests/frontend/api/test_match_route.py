"""``/cache/match``, on a runtime whose tiers have fixed parts of each prompt."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.frontend.api import match
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import pack_tokens
from support.running_site import site_fixture
from support.scripted_runtime import DISK, HOST, ScriptedLoop, Site
from support.site_requests import post

MESSAGES = [{"role": "user", "content": "hi"}]


tiered_site = site_fixture(ready=ScriptedLoop(host=HOST, disk=DISK).ready)


def test_a_prompt_is_matched_and_the_load_reported(site: Site, tokenizer: Tokenizer) -> None:
    reply = site.http.post("/cache/match", json={"prompt": "good day", "cache_salt": "s"})
    assert reply.status_code == 200, reply.text
    assert reply.json() == {
        "page_size": 16,
        "prompts": [{"prompt_tokens": 8, "matched_tokens": {"device": 4}}],
        "load": {
            "running": 0,
            "waiting": 7,
            "max_running": 256,
            "pages": 64,
            "pages_free": 32,
            "pages_evictable": 16,
        },
    }
    matched = site.loop.matched[-1]
    assert (matched.prompts, matched.namespace.cache_salt) == ((tokenizer.encode("good day"),), "s")


def test_each_tier_that_there_is_has_a_count(tiered_site: Site) -> None:
    (found,) = tiered_site.http.post("/cache/match", json={"prompt": "good day"}).json()["prompts"]
    assert found == {"prompt_tokens": 8, "matched_tokens": {"device": 4, "host": 2, "storage": 1}}


def test_each_of_several_prompts_is_matched(site: Site, tokenizer: Tokenizer) -> None:
    found = post(site, "/cache/match", prompt=["hi", "good day"])["prompts"]
    assert site.loop.matched[-1].prompts == (tokenizer.encode("hi"), tokenizer.encode("good day"))
    assert [one["prompt_tokens"] for one in found] == [2, 8], "in the order of the request"


@pytest.mark.parametrize(("prompt", "expected"), [([1, 2, 3], [[1, 2, 3]]), ([[1], [2, 3]], [[1], [2, 3]])])
def test_token_ids(site: Site, prompt: list[Any], expected: list[list[int]]) -> None:
    assert site.http.post("/cache/match", json={"prompt": prompt}).status_code == 200
    assert site.loop.matched[-1].prompts == tuple(map(pack_tokens, expected))


def test_prompts_of_too_many_tokens_together_are_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match, "MAX_MATCHED_TOKENS", 8)
    for prompt, status in (([[1] * 4, [1] * 4], 200), ([1] * 9, 200), ([[1] * 4, [1] * 5], 400)):
        assert site.http.post("/cache/match", json={"prompt": prompt}).status_code == status
