"""A request whose answers have all ended at stop strings ends well, though it fails before the runtime knows."""

from __future__ import annotations

import pytest

from support.scripted_runtime import FAILS_AFTER_THREE, Site
from support.site_requests import events, post

N_PROMPT = 6
PROMPT = "abcdef"
TEXT = "ab"
"""What every answer is, up to the stop string."""


@pytest.fixture(autouse=True)
def _fails(site: Site) -> None:
    site.loop.fails_cancelled_after = 60


COMPLETION = {"prompt": PROMPT, "stop": "cd", "max_tokens": 100}
USAGE = {"prompt_tokens": N_PROMPT, "completion_tokens": 4, "total_tokens": N_PROMPT + 4}
"""What the runtime would have told last, the cached tokens, is not known."""


def test_a_completion(site: Site) -> None:
    body = COMPLETION | {"return_cached_tokens_details": True}
    whole = post(site, "/v1/completions", **body)
    assert [(choice["text"], choice["finish_reason"]) for choice in whole["choices"]] == [(TEXT, "stop")]
    assert whole["usage"] == USAGE
    assert "sglext" not in whole


def test_a_stream_of_completions(site: Site) -> None:
    body = COMPLETION | {"n": 2, "stream_options": {"include_usage": True}}
    *chunks, last = events(site, "/v1/completions", **body)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    reasons = [(choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"]]
    assert sorted(reasons) == [(0, "stop"), (1, "stop")]
    assert last["choices"] == []
    assert last["usage"] == {**USAGE, "completion_tokens": 7, "total_tokens": N_PROMPT + 7}


def test_the_other_prompts_of_the_request_go_on(site: Site) -> None:
    body = COMPLETION | {"prompt": [PROMPT, "xyz"], "max_tokens": 20}
    choices = [choice for chunk in events(site, "/v1/completions", **body) for choice in chunk["choices"]]
    reasons = [(choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"]]
    assert reasons == [(0, "stop"), (1, "length")]


def test_a_request_with_an_answer_that_has_not_ended_fails(site: Site) -> None:
    body = {"prompt": [FAILS_AFTER_THREE, 1, 2, 3], "n": 2, "stop_token_ids": [FAILS_AFTER_THREE], "stream": True}
    site.loop.may_fail = False
    with site.http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        assert any('"finish_reason":"stop"' in line for line in lines)
        site.loop.may_fail = True
        *_, last, end = (line for line in lines if line)
    assert "numerical_error" in last
    assert end == "data: [DONE]"


def test_chats(site: Site) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "stop": "cd", "max_tokens": 100}
    (choice,) = post(site, "/v1/chat/completions", **body)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("<user>ab", "stop")
    last = events(site, "/v1/chat/completions", **body)[-1]
    assert last["choices"][0]["finish_reason"] == "stop"


def test_messages(site: Site) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "stop_sequences": ["cd"], "max_tokens": 100}
    body["model"] = "echo"
    whole = post(site, "/v1/messages", **body)
    assert (whole["content"][0]["text"], whole["stop_sequence"]) == ("<user>ab", "cd")
    n_prompt = len(f"<user>{PROMPT}<assistant>")
    assert whole["usage"]["cache_read_input_tokens"] == n_prompt // 2, "which is known since the first token"
    *_, end, last = events(site, "/v1/messages", **body)
    assert (end["delta"]["stop_sequence"], last) == ("cd", {"type": "message_stop"})


def test_generate(site: Site) -> None:
    body = {"text": PROMPT, "sampling_params": {"stop": "cd", "max_new_tokens": 100}}
    for last in (post(site, "/generate", **body), events(site, "/generate", **body)[-1]):
        assert last["text"] == TEXT
        assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": "cd"}
        assert last["meta_info"]["completion_tokens"] == 4
        assert "cached_tokens" not in last["meta_info"]
