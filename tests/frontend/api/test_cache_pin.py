"""``/cache/pin``, on a runtime that pins half of each prompt."""

from __future__ import annotations

import pytest

from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import pack_tokens
from support.scripted_runtime import Site
from support.site_requests import check_refusal, post


def test_a_prompt_is_pinned_for_the_time_of_the_request(site: Site, tokenizer: Tokenizer) -> None:
    found = post(site, "/cache/pin", prompt="hello", ttl="90s", cache_salt="s")
    assert found == {"prompt_tokens": 5, "pinned_tokens": 2, "seconds_left": 90.0}
    pin = site.loop.pinned[-1]
    assert (pin.tokens, pin.ttl_s, pin.namespace.cache_salt) == (tokenizer.encode("hello"), 90.0, "s")


def test_token_ids_and_the_end_of_a_pin(site: Site) -> None:
    post(site, "/cache/pin", prompt="hi")
    assert site.loop.pinned[-1].ttl_s == 300.0, "the default"
    reply = site.http.post("/cache/pin", json={"prompt": [1, 2, 3], "ttl": "0s"})
    assert reply.json()["seconds_left"] == 0
    assert (site.loop.pinned[-1].tokens, site.loop.pinned[-1].ttl_s) == (pack_tokens([1, 2, 3]), 0.0)


@pytest.mark.parametrize(("ttl", "seconds"), [("1s", 1.0), ("5m", 300.0), ("12h", 43200.0), ("24h", 86400.0)])
def test_each_unit_of_a_time_to_live(site: Site, ttl: str, seconds: float) -> None:
    site.http.post("/cache/pin", json={"prompt": "a", "ttl": ttl})
    assert site.loop.pinned[-1].ttl_s == seconds


def test_an_error_of_the_runtime_is_the_clients(site: Site) -> None:
    site.loop.refuses_pins = True
    check_refusal(site.http.post("/cache/pin", json={"prompt": "a"}), "ttl", "unsupported_feature")
