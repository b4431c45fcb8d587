"""What SGLang's own client sends to ``/generate``."""

from __future__ import annotations

import json
from typing import Any

from support.scripted_runtime import Site

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
SCORED = {"return_logprob": True, "return_text_in_logprobs": True}
NOTHING = {"max_new_tokens": 0, "temperature": 0}


def generate(site: Site, **body: Any) -> Any:
    reply = site.http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_its_settings_are_taken(site: Site) -> None:
    assert generate(site, text="ab", sampling_params=SAMPLING)["text"] == "aba"
    empty: dict[str, Any] = {"image_data": [], "lora_path": "", "session_params": {}}
    assert generate(site, text="ab", sampling_params=SAMPLING, **empty)["text"] == "aba"


def test_it_has_a_prefix_cached(site: Site) -> None:
    found = generate(site, text="abcd", sampling_params={"max_new_tokens": 0})
    assert (found["text"], found["output_ids"]) == ("", [])
    meta = found["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (4, 0, 2)
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert site.loop.submitted[-1].sampling.max_tokens == 1


def test_it_selects_among_texts_by_their_log_probabilities(site: Site) -> None:
    found = generate(site, text=["abc", "abd"], sampling_params=NOTHING, logprob_start_len=1, **SCORED)
    for text, one in zip(("bc", "bd"), found, strict=True):
        assert [entry[2] for entry in one["meta_info"]["input_token_logprobs"]] == list(text)
        assert one["meta_info"]["output_token_logprobs"] == []
        assert one["text"] == ""


def test_a_stream_and_several_answers_have_nothing_either(site: Site) -> None:
    body = {"text": "ab", "sampling_params": {"max_new_tokens": 0, "n": 2, "stop": "b"}, "return_logprob": True}
    whole = generate(site, **body)
    lines = site.http.post("/generate", json={**body, "stream": True}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    for one in (*whole, *(json.loads(line.removeprefix("data: ")) for line in lines[:-2])):
        assert (one["text"], one["output_ids"], one["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert len(whole) == len(lines) - 2 == 2


def test_some_prompts_may_want_an_answer(site: Site) -> None:
    found = generate(site, text=["ab", "cd"], sampling_params=[NOTHING, SAMPLING])
    assert [one["text"] for one in found] == ["", "cdc"]
