"""Texts to tokens and back, and why a prompt is not cached."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from radixkv.config import ServerConfig
from radixkv.frontend.api.explain import explanation
from radixkv.frontend.api.tokenize import MAX_CHARACTERS
from radixkv.frontend.served_model import Served
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import Explained, pack_tokens
from support.running_site import running_site
from support.scripted_runtime import EOS, VOCAB_SIZE, ScriptedLoop, Site

MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}{{ tail }}"


@pytest.fixture(scope="module")
def site(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    template = ChatTemplate(TEMPLATE, {}, "test")
    with running_site(replace(served, chat_template=template), tmp_path_factory.mktemp("s")) as site:
        yield site


@pytest.fixture(scope="module")
def textless(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running_site(replace(served, tokenizer=None), tmp_path_factory.mktemp("s")) as site:
        yield site


def post(site: Site, path: str, **body: Any) -> Any:
    reply = site.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def check_refusal(reply: Any, param: str | None, code: str = "invalid_request") -> None:
    assert reply.status_code == 400, reply.text
    assert (reply.json()["error"]["param"], reply.json()["error"]["code"]) == (param, code)


def test_a_text_has_the_tokens_of_the_tokenizer(site: Site, tokenizer: Tokenizer) -> None:
    for text in ("hello", "héllo 😀", "<eos>", "x" * 9000):
        found = post(site, "/tokenize", prompt=text)
        assert pack_tokens(found["tokens"]) == tokenizer.encode(text)
        assert found["count"] == len(found["tokens"])
        assert (found["max_model_len"], found["token_strs"]) == (512, None)
        assert post(site, "/detokenize", tokens=found["tokens"]) == {"prompt": text}
    assert post(site, "/tokenize", prompt="") == {
        "count": 0,
        "max_model_len": 512,
        "tokens": [],
        "token_strs": None,
    }


def test_tokens_have_names(site: Site) -> None:
    found = post(site, "/tokenize", prompt="a b<eos>", return_token_strs=True)
    assert found["token_strs"] == ["a", "Ġ", "b", "<eos>"]
    assert found["tokens"][-1] == EOS


def test_messages_are_tokenized_as_chat_does(site: Site) -> None:
    text = post(site, "/detokenize", tokens=post(site, "/tokenize", messages=MESSAGES)["tokens"])["prompt"]
    assert text == "hi!"
    found = post(
        site, "/tokenize", messages=MESSAGES, add_generation_prompt=False, chat_template_kwargs={"tail": "?"}
    )
    assert post(site, "/detokenize", tokens=found["tokens"])["prompt"] == "hi?"


def test_special_tokens_are_those_that_are_asked_for(
    site: Site, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def encode(self: Tokenizer, text: str, limit: int | None = None, *, adds_special_tokens: bool = True) -> bytes:
        asked.append(adds_special_tokens)
        return pack_tokens([1])

    monkeypatch.setattr(Tokenizer, "encode_here", encode)  # texts are short, and the loop is to wait for no others
    for body in ({"prompt": "a"}, {"messages": MESSAGES}):
        for path in ("/tokenize", "/cache/explain"):
            post(site, path, **body)
            post(site, path, **body, add_special_tokens=False)
            post(site, path, **body, add_special_tokens=True)
    assert asked == [True, False, True] * 2 + [False, False, True] * 2


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"content": "a"}]}, "messages"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "return_token_strs": "no"}, "return_token_strs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [[1]]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/cache/explain", {}, "prompt"),
        ("/cache/explain", {"prompt": ""}, "prompt"),
        ("/cache/explain", {"prompt": []}, "prompt"),
        ("/cache/explain", {"prompt": ["a"]}, "prompt"),
        ("/cache/explain", {"prompt": [[1]]}, "prompt"),
        ("/cache/explain", {"prompt": [VOCAB_SIZE]}, "prompt"),
        ("/cache/explain", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/cache/explain", {"prompt": "a", "cache_salt": "é" * 65}, "cache_salt"),
        ("/cache/explain", {"prompt": "a", "cache_salt": 5}, "cache_salt"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_a_wrong_field_is_refused_by_name(site: Site, path: str, body: dict[str, Any], param: str) -> None:
    check_refusal(site.http.post(path, json=body), param)
    assert post(site, "/tokenize", prompt="ab")["count"] == 2


def test_other_models_and_features_are_refused(site: Site) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert site.http.post(path, json={**body, "model": "other"}).status_code == 404
        assert site.http.post(path, json={**body, "model": "echo"}).status_code == 200
    reply = site.http.post("/tokenize", json={"messages": MESSAGES, "tools": [{}]})
    check_refusal(reply, "tools", "unsupported_feature")


def test_long_lists_are_refused_before_they_are_decoded(site: Site, served: Served) -> None:
    content = json.dumps({"tokens": [[1] * 40_000]}, separators=(",", ":"))
    reply = site.http.post("/detokenize", content=content, headers={"Content-Type": "application/json"})
    check_refusal(reply, "tokens")
    assert MAX_CHARACTERS > 100_000  # what the site's longest body holds


def test_without_a_tokenizer_there_is_no_text(textless: Site) -> None:
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/cache/explain", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"stop": "a", "prompt": [1]}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/generate", {"text": "a"}),
    ):
        reply = textless.http.post(path, json=body)
        check_refusal(reply, next(iter(body)))
        assert "--tokenizer" in reply.json()["error"]["message"]
    assert post(textless, "/cache/explain", prompt=[1, 2, 3, 4])["cached_tokens"] == 2


def test_the_runtimes_explanation_is_passed_on(site: Site) -> None:
    for body in ({"prompt": "abcd"}, {"prompt": [1, 2, 3, 4]}, {"prompt": "abcd", "cache_salt": "t"}):
        found = post(site, "/cache/explain", **body)
        assert found == {
            "prompt_tokens": 4,
            "cached_tokens": 2,
            "reason": "never_seen",
            "text": "2 of 4 prompt tokens are cached; nothing that was computed before goes on from there.",
        }
    assert post(site, "/cache/explain", messages=MESSAGES)["prompt_tokens"] == 3
    assert isinstance(site.loop, ScriptedLoop)


@pytest.mark.parametrize(
    ("settings", "contents"),
    [
        (ServerConfig(), True),
        (ServerConfig(explain_contents=False), False),
        (ServerConfig(api_key="k"), False),
        (ServerConfig("0.0.0.0", api_key="k"), False),
        (ServerConfig(api_key="k", explain_contents=True), True),
    ],
    ids=["keyless", "keyless, refused", "key", "key and other machines", "key, allowed"],
)
def test_who_shares_a_server_learns_nothing_of_what_others_cached(
    served: Served, tmp_path: Path, settings: ServerConfig, contents: bool
) -> None:
    with running_site(served, tmp_path, settings) as site:  # which listens on this machine in any case
        site.http.headers["Authorization"] = "Bearer k"
        found = post(site, "/cache/explain", prompt="abcd", cache_salt="t")
        assert [(asked.cache_salt, asked.contents) for asked in site.loop.explained] == [("t", contents)]
        assert ("with this cache_salt" in found["text"]) == (not contents)
        assert site.http.get("/server_info").json()["explain_contents"] is contents


@pytest.mark.parametrize(
    ("explained", "expected", "sentence"),
    [
        (
            Explained("e", 40, 32, "whole"),
            {},
            "32 of 40 prompt tokens are cached; those are all whole pages of it.",
        ),
        (Explained("e", 9, 0, "whole"), {}, "0 of 9 prompt tokens are cached; it has no whole page."),
        (
            Explained("e", 40, 16, "differs", 20, 65, 66),
            {
                "first_difference": {
                    "position": 20,
                    "prompt_token": {"id": 65, "text": "b"},
                    "cached_token": {"id": 66, "text": "c"},
                }
            },
            "goes on with other tokens: token 20 is 'b' (65) here and 'c' (66) there.",
        ),
        (Explained("e", 40, 16, "evicted"), {}, "has been evicted since."),
        (
            Explained("e", 40, 0, "other_namespace", n_cached_elsewhere=32),
            {"cached_elsewhere_tokens": 32},
            "another cache_salt has 32 of them, and shares none.",
        ),
    ],
    ids=lambda value: getattr(value, "reason", None),
)
def test_every_reason_is_one_sentence(
    tokenizer: Tokenizer, explained: Explained, expected: dict[str, Any], sentence: str
) -> None:
    found = explanation(explained, tokenizer, contents=True)
    assert found.pop("text").endswith(sentence)
    assert found == {
        "prompt_tokens": explained.n_tokens,
        "cached_tokens": explained.n_cached,
        "reason": explained.reason,
        **expected,
    }
    assert "'b'" not in explanation(explained, None, contents=True)["text"]


def test_what_is_not_told_names_the_flag(tokenizer: Tokenizer) -> None:
    found = explanation(Explained("e", 40, 16, "differs"), tokenizer, contents=False)
    assert found["text"] == (
        "16 of 40 prompt tokens are cached; what is cached goes on with other tokens, which only a server with "
        "--explain-contents tells."
    )
    assert found.keys() == {"prompt_tokens", "cached_tokens", "reason", "text"}
