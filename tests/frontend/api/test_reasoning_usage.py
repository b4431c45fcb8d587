"""``reasoning_tokens`` in the usage of chats and responses, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from support.scripted_runtime import EOS, Site
from support.site_requests import events, post

SHORT, LONG = "<think>\nNo.\n</think>", "<think>\nYes, or é.\n</think>"
ASKED = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def thinking_site(agent_site: Site) -> Site:
    """A site whose model writes one token for each byte, and reasons briefly in choice 0 and longer in choice 1."""
    agent_site.loop.answers = [[*letters(agent_site, f"{text}\n\nHello."), EOS] for text in (SHORT, LONG)]
    return agent_site


def letters(site: Site, text: str) -> list[int]:
    ids: list[int] = site.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return ids


def chat(site: Site, **changes: Any) -> Any:
    return post(site, "/v1/chat/completions", messages=ASKED, **changes)


def n_bytes(*texts: str) -> int:
    return sum(len(text.encode()) for text in texts)


def reasoning_tokens(usage: dict[str, Any]) -> int:
    found: int = usage["completion_tokens_details"]["reasoning_tokens"]
    return found


@pytest.mark.parametrize("stop", [None, "never"])
def test_chats_count_the_reasoning_of_all_choices(thinking_site: Site, stop: str | None) -> None:
    assert reasoning_tokens(chat(thinking_site, stop=stop)["usage"]) == n_bytes(SHORT)
    assert reasoning_tokens(chat(thinking_site, stop=stop, n=2)["usage"]) == n_bytes(SHORT, LONG)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": ASKED, "stop": stop, "n": 2, "stream_options": options}
    counts = [reasoning_tokens(event["usage"]) for event in events(thinking_site, "/v1/chat/completions", **body)]
    assert counts[-1] == n_bytes(SHORT, LONG)
    assert counts == sorted(counts), "it only grows"


def test_reasoning_without_an_end_is_all_of_the_answer(thinking_site: Site) -> None:
    usage = chat(thinking_site, max_tokens=n_bytes(SHORT) - 1)["usage"]
    assert reasoning_tokens(usage) == usage["completion_tokens"] == n_bytes(SHORT) - 1


def test_answers_without_reasoning_have_no_reasoning_tokens(thinking_site: Site, site: Site) -> None:
    thinking_site.loop.answers = [[*letters(thinking_site, "No <think>x</think>."), EOS]]
    assert reasoning_tokens(chat(thinking_site)["usage"]) == 0
    assert reasoning_tokens(chat(site, max_tokens=5)["usage"]) == 0
    assert "completion_tokens_details" not in post(site, "/v1/completions", prompt="a")["usage"]


def test_responses_count_reasoning(thinking_site: Site) -> None:
    def counted(usage: dict[str, Any]) -> int:
        found: int = usage["output_tokens_details"]["reasoning_tokens"]
        return found

    assert counted(post(thinking_site, "/v1/responses", input="Hi")["usage"]) == n_bytes(SHORT)
    *_, last = events(thinking_site, "/v1/responses", input="Hi")
    assert counted(last["response"]["usage"]) == n_bytes(SHORT)
