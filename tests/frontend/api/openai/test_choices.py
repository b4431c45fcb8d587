"""Several choices of one prompt and their ends."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from support.scripted_runtime import EOS, Site
from support.site_requests import events, post

complete = partial(post, path="/v1/completions")
stream = partial(events, path="/v1/completions")


def test_each_prompt_has_n_choices_in_order(site: Site) -> None:
    body = complete(site, prompt=["abc", "xyz"], n=3, best_of=3, max_tokens=4)
    texts = ["abca", "bcab", "cabc", "xyzx", "yzxy", "zxyz"]
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == list(enumerate(texts))
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["completion_tokens"] == 24
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert [submit.sampling.n for submit in site.loop.submitted[-2:]] == [3, 3]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"n": 2, "return_token_ids": True},
        {"stream_options": {"include_usage": True}},
        {"return_token_ids": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
)
def test_all_chunks_of_a_stream_have_the_same_fields_in_one_order(
    site: Site, path: str, settings: dict[str, Any]
) -> None:
    site.loop.step_s = 0.003  # so that most tokens have a chunk of their own
    text = 'a"\\\0\n[-1]é'
    prompt = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    chunks = [chunk for chunk in events(site, path=path, max_tokens=24, **prompt, **settings) if chunk["choices"]]
    unstreamed = {name: value for name, value in settings.items() if name != "stream_options"}
    for index in range(settings.get("n", 1)):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        last, middle = own[-1], own[2:-1]
        assert last["choices"][0]["finish_reason"] == "length"
        assert middle
        for chunk in middle:
            assert list(chunk) == list(last)
            assert list(chunk["choices"][0]) == list(last["choices"][0])
            assert {**chunk, "choices": [], "usage": None} == {**last, "choices": [], "usage": None}
        choices = [chunk["choices"][0] for chunk in own]
        written = "".join(one["text"] if "text" in one else one["delta"].get("content", "") for one in choices)
        whole = post(site, path=path, max_tokens=24, **prompt, **unstreamed)["choices"][index]
        assert written == (whole["text"] if "text" in whole else whole["message"]["content"])
        if "return_token_ids" in settings:
            assert [token for one in choices for token in one.get("token_ids", [])] == whole["token_ids"]


def test_a_stop_string_ends_only_its_choice(site: Site) -> None:
    choices = complete(site, prompt="abcdef", n=3, max_tokens=8, stop="cde")["choices"]
    assert [choice["text"] for choice in choices] == ["ab", "b", ""]
    choices = complete(site, prompt="abcdef", n=3, max_tokens=4, stop="bcd")["choices"]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
        ("a", "stop"),
        ("", "stop"),
        ("cdef", "length"),
    ]
    assert [choice["stop_reason"] for choice in choices] == ["bcd", "bcd", None]


def test_a_choice_that_a_stop_string_ended_generates_no_more(site: Site) -> None:
    site.loop.step_s = 0.02
    body = complete(site, prompt="abcdef", n=2, max_tokens=30, stop="ab")
    assert [choice["text"] for choice in body["choices"]] == ["", "bcdef"]
    assert site.loop.cancelled.count(site.loop.submitted[-1].id) == 2


@pytest.mark.parametrize(
    ("settings", "text", "reason"),
    [
        ({"stop": "lo"}, "hello", "stop"),
        ({"stop": ["zz", "llo"]}, "hello", "stop"),
        ({"stop_token_ids": "l"}, "hel", "stop"),
        ({"max_tokens": 3}, "hel", "length"),
    ],
)
def test_the_stop_string_may_be_included(site: Site, settings: dict[str, Any], text: str, reason: str) -> None:
    if "stop_token_ids" in settings:
        complete(site, prompt="l", max_tokens=1)
        settings = {"stop_token_ids": list(site.loop.submitted[-1].tokens[:1])}
    for streams in (False, True):
        body = {"prompt": "hello", "include_stop_str_in_output": True, **settings}
        pieces = (
            [event["choices"][0] for event in stream(site, **body)]
            if streams
            else complete(site, **body)["choices"]
        )
        assert "".join(piece["text"] for piece in pieces) == text
        assert pieces[-1]["finish_reason"] == reason


def test_special_tokens_are_shown_on_request(site: Site) -> None:
    body = {"prompt": [70, EOS, 71], "max_tokens": 4, "ignore_eos": True}
    plain = complete(site, **body)["choices"][0]["text"]
    with_special_tokens = complete(site, **body, skip_special_tokens=False)["choices"][0]["text"]
    assert with_special_tokens == plain[0] + "<eos>" + plain[1:]
    end = complete(site, prompt=[70, EOS], skip_special_tokens=False)["choices"][0]
    assert (end["text"], end["finish_reason"]) == (plain[0], "stop")
    end = complete(site, prompt=[70, EOS], skip_special_tokens=False, include_stop_str_in_output=True)["choices"][0]
    assert (end["text"], end["finish_reason"]) == (plain[0] + "<eos>", "stop")


@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (1, ""), (2, "abcd"), (6, "abcdabcd"), (7, "abcdabcd")])
def test_stop_strings_count_only_after_min_tokens(site: Site, min_tokens: int, text: str) -> None:
    choice = complete(site, prompt="abcd", max_tokens=20, min_tokens=min_tokens, stop="ab")["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")


def test_all_settings_reach_the_runtime(site: Site) -> None:
    settings = {
        "n": 2,
        "max_tokens": 4,
        "min_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.25,
        "seed": 11,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.5,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 4,
        "prompt_logprobs": 5,
    }
    stops = {"stop": ["x"], "stop_token_ids": [9]}
    others = {"priority": -7, "cache_salt": "tenant", "skip_reading_prefix_cache": True}
    complete(site, prompt="ab", logit_bias={"5": -100, "299": 7.5}, **settings, **stops, **others)
    submit = site.loop.submitted[-1]
    assert {name: getattr(submit.sampling, name) for name in settings} == settings
    assert {name: list(getattr(submit.sampling, name)) for name in stops} == stops
    assert submit.sampling.logit_bias == {5: -100.0, 299: 7.5}
    assert (submit.priority, submit.namespace.cache_salt, submit.reads_cache) == (-7, "tenant", False)


def test_each_chunk_has_the_usage_so_far_on_request(site: Site) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream(site, prompt="hello", max_tokens=5, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert all(event["usage"]["prompt_tokens"] == 5 for event in events)


def test_cached_tokens_are_left_out_until_they_are_known(site: Site) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["hello", "good bye"], "max_tokens": 40, "stream_options": options}
    details = [event["usage"].get("prompt_tokens_details") for event in stream(site, **body)]
    assert details[0] is None
    n_unknown = details.index({"cached_tokens": 2 + 4})
    assert details[:n_unknown] == [None] * n_unknown
    assert details[n_unknown:] == [{"cached_tokens": 6}] * (len(details) - n_unknown)


def test_cached_tokens_details_are_those_of_sglang(site: Site) -> None:
    details = {"cached_tokens_details": {"device": 2, "host": 0}}
    body = {"prompt": "hello", "max_tokens": 2, "return_cached_tokens_details": True}
    assert complete(site, **body)["sglext"] == details
    events = stream(site, **body)
    assert [event.get("sglext") for event in events] == [None] * (len(events) - 1) + [details]
    assert events[-1]["choices"] == []
    last = stream(site, **body, stream_options={"include_usage": True})[-1]
    assert last["sglext"] == details
    assert last["usage"]["completion_tokens"] == 2


def test_one_model_is_described(site: Site) -> None:
    listed = site.http.get("/v1/models").json()["data"][0]
    assert site.http.get("/v1/models/echo").json() == listed
    unknown = site.http.get("/v1/models/other/name")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"
