"""Requests that SGLang's own client sends to ``/generate``."""

from __future__ import annotations

from functools import partial
from typing import Any

from support.scripted_runtime import Site
from support.site_requests import events, post

generate = partial(post, path="/generate")

SAMPLING: dict[str, Any] = {
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "max_new_tokens": 3,
    "min_new_tokens": 0,
    "n": 1,
    "stop": [],
    "stop_token_ids": [],
    "stop_regex": [],
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "ignore_eos": False,
    "regex": None,
    "json_schema": None,
    "logprobs": False,
    "custom_params": {},
}
WITH_LOGPROBS = {"return_logprob": True, "return_text_in_logprobs": True}
PROMPT_ONLY = {"max_new_tokens": 0, "temperature": 0}


def test_the_clients_settings_are_accepted(site: Site) -> None:
    assert generate(site, text="ab", sampling_params=SAMPLING)["text"] == "aba"
    empty: dict[str, Any] = {"image_data": [], "lora_path": "", "session_params": {}}
    assert generate(site, text="ab", sampling_params=SAMPLING, **empty)["text"] == "aba"


def test_the_client_can_cache_a_prefix(site: Site) -> None:
    found = generate(site, text="abcd", sampling_params={"max_new_tokens": 0})
    assert (found["text"], found["output_ids"]) == ("", [])
    meta = found["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (4, 0, 2)
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert site.loop.submitted[-1].sampling.max_tokens == 1


def test_the_client_can_select_by_log_probability(site: Site) -> None:
    found = generate(site, text=["abc", "abd"], sampling_params=PROMPT_ONLY, logprob_start_len=1, **WITH_LOGPROBS)
    for text, choice in zip(("bc", "bd"), found, strict=True):
        assert [entry[2] for entry in choice["meta_info"]["input_token_logprobs"]] == list(text)
        assert choice["meta_info"]["output_token_logprobs"] == []
        assert choice["text"] == ""


def test_prompt_only_requests_may_stream_and_have_several_choices(site: Site) -> None:
    body = {"text": "ab", "sampling_params": {"max_new_tokens": 0, "n": 2, "stop": "b"}, "return_logprob": True}
    whole = generate(site, **body)
    streamed = events(site, "/generate", **body)
    for choice in (*whole, *streamed):
        assert (choice["text"], choice["output_ids"], choice["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert len(whole) == len(streamed) == 2


def test_only_some_prompts_of_a_request_may_generate(site: Site) -> None:
    found = generate(site, text=["ab", "cd"], sampling_params=[PROMPT_ONLY, SAMPLING])
    assert [choice["text"] for choice in found] == ["", "cdc"]
