"""Log-probabilities and echoed prompts in the formats of OpenAI, vLLM and lm-eval."""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, processors

from radixkv.frontend.api.openai.logprobs import chat_token, completion_token, prompt_entry
from radixkv.frontend.api.sglang.logprobs import render_with_text
from radixkv.frontend.served_model import ServedModel
from radixkv.generation import params
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import TokenLogprobs, pack_tokens, unpack_tokens
from support.running_site import running_site
from support.scripted_runtime import EOS, Site, scripted_logprobs, write_tokenizer
from support.site_requests import events, post
from support.small_tokenizers import sentencepiece

complete = partial(post, path="/v1/completions")
stream = partial(events, path="/v1/completions")


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return unpack_tokens(tokenizer.encode(text))


def expected_top_logprobs(tokenizer: Tokenizer, token: int, count: int) -> dict[str, float]:
    """Returns the log-probabilities of the scripted runtime, the token itself first."""
    logprobs = scripted_logprobs(token, count)
    others = zip(unpack_tokens(logprobs.top_ids), (-0.5 * rank for rank in range(1, count + 1)), strict=True)
    texts = {tokenizer.decode([token]): -1.0}
    for other, logprob in others:
        texts.setdefault(tokenizer.decode([other]), logprob)
    return texts


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_a_completions_logprobs(site: Site, tokenizer: Tokenizer, count: int) -> None:
    logprobs = complete(site, prompt="hello", max_tokens=7, logprobs=count)["choices"][0]["logprobs"]
    ids = ids_of(tokenizer, "hellohe")
    assert logprobs == {
        "tokens": list("hellohe"),
        "token_logprobs": [-1.0] * 7,
        "top_logprobs": [expected_top_logprobs(tokenizer, token, count) for token in ids],
        "text_offset": list(range(7)),
    }


def test_a_chats_logprobs(site: Site) -> None:
    body = {"messages": [{"role": "user", "content": "é"}], "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    choice = site.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["message"]["content"] == "<user>é"
    assert choice["logprobs"]["refusal"] is None
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-1.0] * 8
    assert content[0]["token"] == "<"
    assert content[6]["token"] == content[7]["token"] == "\N{REPLACEMENT CHARACTER}"
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "<user>é"
    for entry in content:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][1] == {name: entry[name] for name in ("token", "logprob", "bytes")}
        assert entry["top_logprobs"][0]["logprob"] == -0.5
    body |= {"top_logprobs": None}
    choice = site.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[]] * 8


@pytest.mark.parametrize("prompt", ["hello", [72, 69, 76, 76, 79]])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_an_echoed_prompt_has_logprobs(site: Site, tokenizer: Tokenizer, prompt: Any, max_tokens: int) -> None:
    """Covers the fields that lm-eval's loglikelihood reads."""
    reply = complete(site, prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=1, temperature=0)
    ids = unpack_tokens(site.loop.submitted[-1].tokens)
    choice, logprobs = reply["choices"][0], reply["choices"][0]["logprobs"]
    tokens = (ids * 2)[: 5 + max_tokens]
    text = tokenizer.decode(tokens)
    assert choice["text"] == text
    assert choice["finish_reason"] == "length"
    assert logprobs["tokens"] == list(text)
    assert logprobs["token_logprobs"] == [None] + [-1.0] * (4 + max_tokens)
    assert logprobs["top_logprobs"] == [None] + [expected_top_logprobs(tokenizer, token, 1) for token in tokens[1:]]
    assert logprobs["text_offset"] == list(range(5 + max_tokens))
    assert reply["usage"]["completion_tokens"] == max_tokens


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 3},
        {"max_tokens": 0},
        {"max_tokens": 3, "n": 2, "logprobs": 2},
        {"max_tokens": 0, "n": 2, "logprobs": 0},
        {"max_tokens": 9, "n": 3, "logprobs": 0, "stop": "oh"},
    ],
    ids=str,
)
def test_echo_in_a_stream_equals_echo_in_a_whole_response(site: Site, body: dict[str, Any]) -> None:
    body |= {"prompt": ["hello", "abc"], "echo": True}
    whole = complete(site, **body)
    streamed = stream(site, **body, stream_options={"include_usage": True})
    assert streamed.pop()["usage"] == whole["usage"]
    for expected in whole["choices"]:
        pieces = [event["choices"][0] for event in streamed]
        pieces = [piece for piece in pieces if piece["index"] == expected["index"]]
        assert "".join(piece["text"] for piece in pieces) == expected["text"]
        assert pieces[-1]["finish_reason"] == expected["finish_reason"]
        if expected["logprobs"] is not None:
            for name, values in expected["logprobs"].items():
                assert [value for piece in pieces for value in piece["logprobs"][name]] == values


def test_echo_without_logprobs_requests_none(site: Site) -> None:
    choice = complete(site, prompt="hello", max_tokens=2, echo=True)["choices"][0]
    assert (choice["text"], choice["logprobs"]) == ("hellohe", None)
    assert site.loop.submitted[-1].sampling.prompt_logprobs is None


@pytest.mark.parametrize("count", [0, 1, 3])
def test_prompt_logprobs_have_the_format_of_vllm(site: Site, tokenizer: Tokenizer, count: int) -> None:
    ids = ids_of(tokenizer, "hello")
    expected: list[Any] = [None]
    for token in ids[1:]:
        entries = {str(token): {"logprob": -1.0, "rank": 2, "decoded_token": tokenizer.decode([token])}}
        for rank, other in enumerate(unpack_tokens(scripted_logprobs(token, count).top_ids), start=1):
            logprob = {"logprob": -0.5 * rank, "rank": rank, "decoded_token": tokenizer.decode([other])}
            entries.setdefault(str(other), logprob)
        expected.append(entries)
    choice = complete(site, prompt="hello", max_tokens=1, prompt_logprobs=count)["choices"][0]
    assert choice["prompt_logprobs"] == expected
    assert choice["text"] == "h"
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "max_tokens": 1, "prompt_logprobs": count}
    chat = site.http.post("/v1/chat/completions", json=body).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert chat["prompt_logprobs"][7:11] == expected[1:]


def test_echo_and_prompt_logprobs_each_show_the_requested_number(site: Site) -> None:
    body = {"prompt": "hello", "max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 4}
    choice = complete(site, **body)["choices"][0]
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [4] * 4
    assert [len(entry) for entry in choice["logprobs"]["top_logprobs"][1:5]] == [2] * 4


@pytest.mark.parametrize("settings", [{"prompt_logprobs": 3}, {"echo": True, "logprobs": 3}])
def test_prompt_logprobs_are_limited_per_request(
    site: Site, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(params, "MAX_PROMPT_LOGPROBS", 40)
    complete(site, prompt=["hello", "abcde"], max_tokens=1, **settings)
    refused = site.http.post("/v1/completions", json={"prompt": ["hello", "abcdef"], "max_tokens": 1, **settings})
    assert refused.json()["error"]["param"] in settings
    assert "44 log-probabilities; at most 40" in refused.json()["error"]["message"]


def test_prompt_logprobs_of_generate_are_limited_per_request(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(params, "MAX_PROMPT_LOGPROBS", 40)
    body = {"text": ["hello", "abcdef"], "return_logprob": True, "top_logprobs_num": 3}
    assert site.http.post("/generate", json={**body, "logprob_start_len": [-1, 0]}).status_code == 200
    error = site.http.post("/generate", json={**body, "logprob_start_len": 0}).json()["error"]
    assert error["param"] == "top_logprobs_num"
    assert "44 log-probabilities; at most 40" in error["message"]


def test_offsets_are_positions_in_the_text(site: Site) -> None:
    body = {"prompt": "a日é", "max_tokens": 6, "logprobs": 0, "echo": True}
    choice = complete(site, **body)["choices"][0]
    assert choice["text"] == "a日éa日é"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2, 2, 3, 4, 4, 4, 5, 5]


@pytest.mark.parametrize(
    ("prompt", "skips", "text", "offsets"),
    [
        ("ab", False, "ab", [0, 0, 1]),
        ("ab", True, "ab", [0, 0, 1]),
        ("a<eos>b", False, "a<eos>b", [0, 0, 1, 6]),
        ("a<eos>b", True, "a<eos>b", [0, 0, 1, 6]),
        ([EOS, 64, EOS, 65], False, "<eos>a<eos>b", [0, 5, 6, 11]),
        ([EOS, 64, EOS, 65], True, "ab", [0, 0, 1, 1]),
        ([127, EOS, 65], False, "\N{REPLACEMENT CHARACTER}<eos>b", [0, 0, 6]),
    ],
)
def test_offsets_count_special_tokens_only_if_the_echo_shows_them(
    served_model: ServedModel, tmp_path: Path, prompt: Any, skips: bool, text: str, offsets: list[int]
) -> None:
    write_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", EOS)])
    with running_site(replace(served_model, tokenizer=Tokenizer(backend)), tmp_path) as site:
        body = {"prompt": prompt, "skip_special_tokens": skips, "max_tokens": 0, "logprobs": 0, "echo": True}
        choice = complete(site, **body)["choices"][0]
    assert choice["text"] == text
    assert choice["logprobs"]["text_offset"] == offsets


def test_tokens_after_a_stop_string_have_no_logprobs(site: Site) -> None:
    choice = complete(site, prompt="hello", max_tokens=50, logprobs=0, stop="oh")["choices"][0]
    assert choice["text"] == "hell"
    assert choice["logprobs"]["tokens"] == list("helloh")


def test_an_impossible_token_is_minus_9999(tokenizer: Tokenizer) -> None:
    never = TokenLogprobs(-float("inf"), 9, b"", b"")
    assert completion_token(tokenizer, 5, 0, never, 1).logprob == -9999.0
    assert b"-9999.0" in bytes(chat_token(tokenizer, 5, 0, never, 1).encoded)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_tokens_own_logprob_equals_that_among_the_likeliest(tokenizer: Tokenizer, count: int) -> None:
    # The runtime reports the token's own log-probability in float64, which may round to the next float32.
    close = struct.pack("<2f", -0.1, -1.1)
    token_logprobs = TokenLogprobs(-1.1000001, 2, pack_tokens([6, 5])[: 4 * count], close[: 4 * count])
    (among,) = struct.unpack("<f", close[4:] if count == 2 else struct.pack("<f", -1.1000001))
    assert completion_token(tokenizer, 5, 0, token_logprobs, count).logprob == among
    chat = msgspec.json.decode(chat_token(tokenizer, 5, 0, token_logprobs, count).encoded)
    assert chat["logprob"] == among
    assert [other["logprob"] for other in chat["top_logprobs"]] == list(
        struct.unpack(f"<{count}f", close[: 4 * count])
    )
    assert msgspec.json.decode(prompt_entry(tokenizer, 5, token_logprobs, count))["5"]["logprob"] == among
    assert render_with_text(tokenizer, 5, 0, token_logprobs, count).logprob == among


def test_tokens_that_are_no_characters_have_names_of_their_own(site: Site, tokenizer: Tokenizer) -> None:
    body = {"prompt": "🎉 é", "max_tokens": 7, "logprobs": 5, "echo": True}
    logprobs = complete(site, **body)["choices"][0]["logprobs"]
    names = ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x8e", "bytes:\\x89", " ", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["tokens"] == names * 2
    for name, alternatives in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert len(alternatives) == 5
        assert alternatives[name] == -1.0
        assert max(alternatives, key=alternatives.__getitem__) != name  # the scripted token is the second likeliest


@pytest.fixture(scope="module")
def doubled() -> Tokenizer:
    """A tokenizer in which s is two tokens, and \ufffd one beside those of single bytes."""
    return Tokenizer(sentencepiece(decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])))


@given(data=st.data())
def test_no_two_tokens_share_a_name(doubled: Tokenizer, data: st.DataObject) -> None:
    """A greedy token is told from others as lm-eval does it."""
    n = doubled.vocab_size + 3
    with_texts = [token for token in range(n) if doubled.token_text(token) in ("s", "t", "e", "")]
    some = st.sampled_from(with_texts) | st.integers(0, n - 1)
    ids = data.draw(st.lists(some, min_size=1, max_size=12, unique=True))
    token = data.draw(st.sampled_from(ids) | some)
    logprobs = struct.pack(f"<{len(ids)}f", *(-1.0 - rank for rank in range(len(ids))))
    own = -1.0 - ids.index(token) if token in ids else -50.0
    rendered = completion_token(doubled, token, 0, TokenLogprobs(own, 1, pack_tokens(ids), logprobs), len(ids))
    names = msgspec.json.decode(rendered.encoded)
    assert len(names) == len({token, *ids})
    assert names[rendered.text] == own
    assert (max(names, key=names.__getitem__) == rendered.text) == (token == ids[0])


@pytest.mark.parametrize("streams", [False, True])
def test_tokens_may_be_named_by_their_ids(site: Site, tokenizer: Tokenizer, streams: bool) -> None:
    ids = ids_of(tokenizer, "é!é!")
    names = [f"token_id:{token}" for token in ids]
    wanted = {"return_tokens_as_token_ids": True, "stream": streams}
    body = {"prompt": "é!", "max_tokens": 3, "logprobs": 2, "echo": True, **wanted}
    if streams:
        logprobs = [event["choices"][0]["logprobs"] for event in stream(site, **body)]
        tokens, alternatives = (
            [one for each in logprobs for one in each[name]] for name in ("tokens", "top_logprobs")
        )
    else:
        choice = complete(site, **body)["choices"][0]
        tokens, alternatives = choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"]
        assert choice["text"] == "é!é!"
    assert tokens == names
    assert [list(each) for each in alternatives[1:]] == [
        [f"token_id:{token}", f"token_id:{token + 1}"] for token in ids[1:]
    ]
    chat = {"messages": [{"role": "user", "content": "é"}], "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    if not streams:
        reply = site.http.post("/v1/chat/completions", json={**chat, **wanted}).json()
        content = reply["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [
            f"token_id:{token}" for token in ids_of(tokenizer, "<user>é")
        ]
        assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "<user>é"
        likeliest = [other["token"] for other in content[0]["top_logprobs"]]
        assert likeliest == [f"token_id:{ids_of(tokenizer, '<')[0] + 1}", content[0]["token"]]


def test_a_request_decides_about_names_before_the_server(served_model: ServedModel, tmp_path: Path) -> None:
    with running_site(replace(served_model, names_tokens_by_id=True), tmp_path) as site:
        found = [
            complete(site, prompt="ab", max_tokens=1, logprobs=0, return_tokens_as_token_ids=wanted)["choices"][0]
            for wanted in (None, False)
        ]
    assert [choice["logprobs"]["tokens"] for choice in found] == [["token_id:64"], ["a"]]


def test_without_a_tokenizer_tokens_are_shown_as_ids() -> None:
    rendered = completion_token(None, 5, 0, scripted_logprobs(5, 2), 2)
    assert rendered.text == "token_id:5"
    assert msgspec.json.decode(rendered.encoded) == {"token_id:5": -1.0, "token_id:6": -0.5}
