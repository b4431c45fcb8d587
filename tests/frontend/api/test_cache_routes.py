"""What the routes of the cache send to the runtime, and what they refuse before it hears of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radixkv.text.tokenizer import Tokenizer
from support.scripted_runtime import MAX_MODEL_LEN, VOCAB_SIZE, Site
from support.site_requests import check_refusal, post

PROMPT, MESSAGES = [1] * 16, [{"role": "user", "content": "hi"}]
LONG_SALT = "é" * 65
WRONG_EVERYWHERE: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [VOCAB_SIZE] * 16}, "prompt"),
    ({"prompt": PROMPT, "messages": MESSAGES}, "prompt"),
    ({"messages": []}, "messages"),
    ({"prompt": PROMPT, "cache_salt": LONG_SALT}, "cache_salt"),
    ({"prompt": PROMPT, "cache_salt": 5}, "cache_salt"),
]
WRONG_TTLS = ("abc", "", "5", "-5m", "5 m", "1.5h", "5d", "25h", "9999999s", "٥m", "5m\n", 300)
WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "/cache/explain": [({"prompt": ["a"]}, "prompt"), ({"prompt": [[1]]}, "prompt")],
    "/cache/pin": [({"prompt": ["a"]}, "prompt"), *[({"prompt": "a", "ttl": ttl}, "ttl") for ttl in WRONG_TTLS]],
    "/cache/match": [
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1] * (MAX_MODEL_LEN + 1)}, "prompt"),
        ({"prompt": "a" * (MAX_MODEL_LEN + 1)}, "prompt"),
    ],
    "/cache/invalidate": [
        ({"cache_salt": None}, "prompt"),
        ({"prompt": "", "cache_salt": "a"}, "prompt"),
        ({"prompt": "short"}, "prompt"),
        ({"prompt": [1] * 15}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"cache_salt": LONG_SALT}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
    ],
}
CASES = [(path, *case) for path, own in WRONG.items() for case in (*WRONG_EVERYWHERE, *own)]


@pytest.mark.parametrize(("path", "body", "param"), CASES, ids=lambda value: json.dumps(value)[:40])
def test_a_wrong_field_is_refused_by_name(site: Site, path: str, body: dict[str, Any], param: str) -> None:
    def n_received() -> int:
        return sum(map(len, (site.loop.explained, site.loop.pinned, site.loop.matched, site.loop.invalidated)))

    n_before = n_received()
    is_too_long = len(body.get("prompt", "")) > MAX_MODEL_LEN
    code = "context_length_exceeded" if is_too_long else "invalid_request"
    check_refusal(site.http.post(path, json=body), param, code)
    assert n_received() == n_before


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": MESSAGES}, "<user>hi<assistant>"),
        ({"messages": MESSAGES, "add_generation_prompt": False}, "<user>hi"),
        ({"prompt": "hi"}, "hi"),
    ],
)
@pytest.mark.parametrize("path", ["/cache/explain", "/cache/match", "/cache/pin"])
def test_prompts_and_messages_become_what_requests_send(
    site: Site, tokenizer: Tokenizer, path: str, body: dict[str, Any], text: str
) -> None:
    assert post(site, path, **body)
    loop = site.loop
    sent = {"/cache/explain": loop.explained, "/cache/match": loop.matched, "/cache/pin": loop.pinned}
    tokens = sent[path][-1].prompts[0] if path == "/cache/match" else sent[path][-1].tokens
    assert tokens == tokenizer.encode(text)
