"""Choices, log-probabilities and chat on the real engine: equivalent requests have equal results."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.live import LiveServer

PROMPT = "The rain in Spain stays mainly in the plain. " * 6
MESSAGES = [{"role": "system", "content": PROMPT}, {"role": "user", "content": "Where does it rain?"}]


pytestmark = pytest.mark.usefixtures("exact_and_idle_afterwards")


def chat(server: LiveServer, **body: Any) -> dict[str, Any]:
    reply = server.http.post("/v1/chat/completions", json={"messages": MESSAGES, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_each_choice_equals_its_seed_alone(server: LiveServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True, "logprobs": 3}
    together = server.complete(**body, n=4, seed=11)
    alone = [server.complete(**body, seed=11 + index)["choices"][0] for index in range(4)]
    assert [{**choice, "index": 0} for choice in together["choices"]] == alone
    assert len({choice["text"] for choice in alone}) > 1
    assert together["usage"]["completion_tokens"] == 48


def test_echo_logprobs_are_the_same_cold_and_warm(server: LiveServer) -> None:
    """It also equals the answer's own logprobs, as in lm-eval's loglikelihood of a greedy continuation."""
    greedy = {"temperature": 0, "ignore_eos": True, "logprobs": 2, "return_token_ids": True}
    first = server.complete(prompt=PROMPT, max_tokens=20, **greedy)["choices"][0]
    ids = first["prompt_token_ids"] + first["token_ids"]
    scoring = {"prompt": ids, "max_tokens": 1, "echo": True, **greedy}
    server.http.post("/flush_cache")
    cold = server.complete(**scoring)["choices"][0]["logprobs"]
    warm = server.complete(**scoring)["choices"][0]["logprobs"]
    assert cold == warm
    answer = slice(len(first["prompt_token_ids"]), len(ids))
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert cold[name][answer] == first["logprobs"][name]
    for text, likeliest in zip(cold["tokens"][answer], cold["top_logprobs"][answer], strict=True):
        assert max(likeliest, key=likeliest.__getitem__) == text
    plain = server.complete(prompt=ids, max_tokens=1, temperature=0)
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_prompt_logprobs_are_those_of_the_echo(server: LiveServer) -> None:
    body = {"prompt": PROMPT, "temperature": 0}
    entries = server.complete(**body, max_tokens=1, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    echo = server.complete(**body, max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]
    assert entries[0] is None is echo["token_logprobs"][0]
    own = [next(iter(entry.values())) for entry in entries[1:]]
    assert [entry["logprob"] for entry in own] == echo["token_logprobs"][1:]
    assert [entry["decoded_token"] for entry in own] == echo["tokens"][1:]
    assert all(entry["rank"] >= 1 for entry in own)


def test_chat_is_the_completion_of_the_rendered_text(server: LiveServer) -> None:
    greedy = {"temperature": 0, "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
    reply = chat(server, **greedy)
    same = server.complete(prompt=reply["prompt_token_ids"], **greedy)["choices"][0]
    assert reply["choices"][0]["message"]["content"] == same["text"]
    assert reply["choices"][0]["token_ids"] == same["token_ids"]
    follow = [*MESSAGES, {"role": "assistant", "content": same["text"]}, {"role": "user", "content": "Why?"}]
    usage = chat(server, messages=follow, max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= len(reply["prompt_token_ids"]) // 2


def test_a_chat_stream_equals_the_whole_response(server: LiveServer) -> None:
    body = {"n": 2, "seed": 3, "max_tokens": 24, "stop": ["e"], "logprobs": True, "top_logprobs": 2}
    whole = chat(server, **body)
    text = server.http.post("/v1/chat/completions", json={"messages": MESSAGES, **body, "stream": True}).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line)["choices"][0] for line in lines]
    for expected in whole["choices"]:
        own_chunks = [chunk for chunk in chunks if chunk["index"] == expected["index"]]
        assert "".join(chunk["delta"]["content"] for chunk in own_chunks) == expected["message"]["content"]
        assert own_chunks[-1]["finish_reason"] == expected["finish_reason"]
        entries = [entry for chunk in own_chunks[1:] for entry in chunk["logprobs"]["content"]]
        assert entries == expected["logprobs"]["content"]


def test_sampling_settings_change_the_answer(server: LiveServer) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    (first, *_), forced = server.complete(**body)["choices"][0]["token_ids"], 77
    banned = server.complete(**body, logit_bias={str(first): -100})["choices"][0]["token_ids"]
    assert first not in banned
    assert server.complete(**body, logit_bias={str(forced): 100})["choices"][0]["token_ids"] == [forced] * 8
    penalised = {"logit_bias": {str(forced): 10}, "presence_penalty": 2, "repetition_penalty": 5}
    assert server.complete(**body, **penalised)["choices"][0]["token_ids"].count(forced) < 8
    ended = server.complete(**body, stop_token_ids=[first])["choices"][0]
    assert (ended["token_ids"], ended["stop_reason"], ended["text"]) == ([first], first, "")
    later = server.complete(**body, stop_token_ids=[first], min_tokens=4)["choices"][0]["token_ids"]
    assert len(later) >= 4
    assert first not in later[:4]
