"""``/tokenize``, ``/detokenize`` and ``/cache/explain``."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from radixkv.frontend.api.explain import explanation
from radixkv.frontend.api.tokenize import MAX_CHARACTERS
from radixkv.frontend.served_model import ServedModel
from radixkv.settings.server_config import ServerConfig
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.cache_messages import Explained
from radixkv.wire.messages import pack_tokens
from support.running_site import running_site, site_fixture
from support.scripted_runtime import EOS, VOCAB_SIZE, ScriptedLoop, Site
from support.site_requests import check_refusal, post, post_bytes

MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}{{ tail }}"


site = site_fixture(chat_template=ChatTemplate(TEMPLATE, {}, "test"))


site_without_tokenizer = site_fixture(tokenizer=None)


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


def test_token_strings_are_returned_on_request(site: Site) -> None:
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


def test_the_configuration_of_the_tokenizer_is_shown(served_model: ServedModel, tmp_path: Path) -> None:
    """lm-eval takes a server's tokenizer if this has an ``eos_token``, and renders chats with the template."""
    config = {"bos_token": "<s>", "eos_token": None, "chat_template": [{"name": "default", "template": "older"}]}
    template = ChatTemplate(TEMPLATE, {}, "--chat-template")
    with running_site(replace(served_model, tokenizer_info=config, chat_template=template), tmp_path) as site:
        found = site.http.get("/tokenizer_info").json()
        assert found == {"bos_token": "<s>", "eos_token": "<eos>", "chat_template": TEMPLATE}
        assert post(site, "/tokenize", prompt=found["eos_token"], add_special_tokens=False)["tokens"] == [EOS]


def test_special_tokens_are_added_as_requested(
    site: Site, served_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = []

    def encode(
        self: Tokenizer, text: str, limit: int | None = None, *, adds_special_tokens: bool, namespace: str
    ) -> bytes:
        options.append(adds_special_tokens)
        return pack_tokens([1])

    monkeypatch.setattr(Tokenizer, "encode_inline", encode)  # the method for short texts
    for body in ({"prompt": "a"}, {"messages": MESSAGES}):
        for path in ("/tokenize", "/cache/explain"):
            post(site, path, **body)
            post(site, path, **body, add_special_tokens=False)
            post(site, path, **body, add_special_tokens=True)
    assert options == [True, False, True] * 2 + [False, False, True] * 2


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
    reply = site.http.post("/tokenize", json={"messages": MESSAGES, "functions": [{}]})
    check_refusal(reply, "functions", "unsupported_feature")


def test_long_lists_are_refused_before_they_are_decoded(site: Site, served_model: ServedModel) -> None:
    content = json.dumps({"tokens": [[1] * 40_000]}, separators=(",", ":"))
    check_refusal(post_bytes(site, "/detokenize", content), "tokens")
    assert MAX_CHARACTERS > 100_000  # the site's longest body is shorter


def test_without_a_tokenizer_there_is_no_text(site_without_tokenizer: Site) -> None:
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/cache/explain", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"stop": "a", "prompt": [1]}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/generate", {"text": "a"}),
    ):
        reply = site_without_tokenizer.http.post(path, json=body)
        assert "--tokenizer" in check_refusal(reply, next(iter(body)))
    assert post(site_without_tokenizer, "/cache/explain", prompt=[1, 2, 3, 4])["cached_tokens"] == 2
    check_refusal(site_without_tokenizer.http.get("/tokenizer_info"), None)


def test_the_explanation_of_the_runtime_is_returned(site: Site) -> None:
    for body in ({"prompt": "abcd"}, {"prompt": [1, 2, 3, 4]}, {"prompt": "abcd", "cache_salt": "t"}):
        found = post(site, "/cache/explain", **body)
        assert found.pop("text").startswith("2 of 4 ")
        assert found == {"prompt_tokens": 4, "cached_tokens": 2, "reason": "never_seen"}
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
def test_a_shared_server_hides_cached_tokens_of_other_clients(
    served_model: ServedModel, tmp_path: Path, settings: ServerConfig, contents: bool
) -> None:
    with running_site(served_model, tmp_path, settings) as site:  # always on a local port
        site.http.headers["Authorization"] = "Bearer k"
        found = post(site, "/cache/explain", prompt="abcd", cache_salt="t")
        assert [(query.namespace.cache_salt, query.contents) for query in site.loop.explained] == [("t", contents)]
        assert ("with this cache_salt" in found["text"]) == (not contents)
        assert site.http.get("/server_info").json()["explain_contents"] is contents


B_AND_C = {"prompt_token": {"id": 65, "text": "b"}, "cached_token": {"id": 66, "text": "c"}}


@pytest.mark.parametrize(
    ("explained", "expected", "parts"),
    [
        (Explained("e", 40, 32, "whole"), {}, ["32 of 40", "all full pages"]),
        (Explained("e", 9, 0, "whole"), {}, ["0 of 9", "no full page"]),
        (Explained("e", 32, 31, "whole"), {}, ["31 of 32", "last token"]),
        (
            Explained("e", 150, 128, "whole", n_without_state=16),
            {"without_state_tokens": 16},
            ["128 of 150", "pages match up to token 144", "not before the prompt's last token"],
        ),
        (
            Explained("e", 400, 64, "no_state", n_without_state=272),
            {"without_state_tokens": 272},
            ["64 of 400", "pages match up to token 336", "state", "at 64"],
        ),
        (
            Explained("e", 40, 35, "whole", 35, 65, 66),
            {"first_difference": {"position": 35, **B_AND_C}},
            ["35 of 40", "token 35", "'b' (65)", "'c' (66)"],
        ),
        (
            Explained("e", 40, 16, "differs", 20, 65, 66),
            {"first_difference": {"position": 20, **B_AND_C}},
            ["token 20", "'b' (65)", "'c' (66)"],
        ),
        (Explained("e", 40, 16, "evicted"), {}, ["16 of 40", "evicted"]),
        (
            Explained("e", 40, 0, "other_namespace", n_cached_elsewhere=32),
            {"cached_elsewhere_tokens": 32},
            ["0 of 40", "32 ", "another cache_salt"],
        ),
        (
            Explained("e", 40, 16, "invocation", n_cached_elsewhere=32),
            {"cached_elsewhere_tokens": 32},
            ["16 of 40", "invocation stands elsewhere in what is cached"],
        ),
        (
            Explained("e", 40, 16, "invocation", adapter_elsewhere="12ab"),
            {},
            ["16 of 40", "the cache goes on", "with another adapter"],
        ),
        (
            Explained("e", 40, 32, "whole", n_in_host=16, is_loaded=True, min_loaded_tokens=4.5),
            {"host": {"tokens": 16, "is_loaded": True, "min_loaded_tokens": 4.5}},
            ["32 of 40", "16 of them in the host tier", "loads them", "all full pages"],
        ),
        (
            Explained("e", 40, 16, "evicted", n_in_host=16, min_loaded_tokens=100.0),
            {"host": {"tokens": 16, "is_loaded": False, "min_loaded_tokens": 100.0}},
            ["16 of 40", "16 more", "computes", "above 100 tokens", "evicted"],
        ),
        (
            Explained("e", 40, 16, "evicted", n_in_host=16, min_loaded_tokens=math.inf),
            {"host": {"tokens": 16, "is_loaded": False, "min_loaded_tokens": math.inf}},
            ["16 of 40", "16 more", "computing is faster"],
        ),
        (
            Explained("e", 40, 16, "evicted", n_in_host=16),
            {"host": {"tokens": 16, "is_loaded": False}},
            ["16 of 40", "16 more", "never"],
        ),
    ],
    ids=lambda value: getattr(value, "reason", None),
)
def test_every_reason_gives_one_sentence(
    tokenizer: Tokenizer, explained: Explained, expected: dict[str, Any], parts: list[str]
) -> None:
    found = explanation(explained, tokenizer, contents=True)
    text = found.pop("text")
    assert all(part in text for part in parts)
    assert found == {
        "prompt_tokens": explained.n_tokens,
        "cached_tokens": explained.n_cached,
        "reason": explained.reason,
        **expected,
    }
    assert "'b'" not in explanation(explained, None, contents=True)["text"]


def test_a_hidden_difference_names_the_flag(tokenizer: Tokenizer) -> None:
    found = explanation(Explained("e", 40, 16, "differs"), tokenizer, contents=False)
    assert found["text"].startswith("16 of 40 ")
    assert "--explain-contents" in found["text"]
    assert found.keys() == {"prompt_tokens", "cached_tokens", "reason", "text"}
