"""``prompt_cache_options`` and breakpoints, on a runtime that keeps what was submitted. A token is a character."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from radixkv.frontend.served_model import ServedModel
from radixkv.text.chat_template import ChatTemplate
from support.running_site import running_site
from support.scripted_runtime import Site
from support.site_requests import check_refusal


def part(text: str, ttl: str | None = None) -> dict[str, Any]:
    """Returns a text part with a breakpoint."""
    marker = {"mode": "explicit"} if ttl is None else {"mode": "explicit", "ttl": ttl}
    return {"type": "text", "text": text, "prompt_cache_breakpoint": marker}


def message(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def post(site: Site, messages: list[dict[str, Any]], **body: Any) -> Any:
    return site.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1, **body})


def pins(site: Site, messages: list[dict[str, Any]], **body: Any) -> list[tuple[int, float]]:
    """Returns length and lifetime of the prefixes that a request pins."""
    reply = post(site, messages, **body)
    assert reply.status_code == 200, reply.text
    return [(pin.n_tokens, pin.ttl_s) for pin in site.loop.submitted[-1].pins]


HELLO = [{"role": "user", "content": "hello"}]
N_HELLO = len("<user>hello<assistant>")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [(N_HELLO, 1800.0)]),
        ({"ttl": "5m"}, [(N_HELLO, 300.0)]),
        ({"mode": "implicit", "ttl": "30m"}, [(N_HELLO, 1800.0)]),
        ({"mode": "implicit", "ttl": None}, [(N_HELLO, 1800.0)]),
        ({"mode": "explicit"}, []),
        ({"mode": "explicit", "ttl": "30m"}, []),
        (None, []),
    ],
)
def test_options_pin_the_whole_prompt_or_nothing(
    site: Site, options: dict[str, Any] | None, expected: list[tuple[int, float]]
) -> None:
    assert pins(site, HELLO, prompt_cache_options=options) == expected


def test_a_request_without_options_pins_nothing(site: Site) -> None:
    assert pins(site, HELLO, prompt_cache_key="k", prompt_cache_retention="24h") == []


def test_each_prompt_of_completions_is_pinned(site: Site) -> None:
    body = {"prompt": ["hello", "hi"], "max_tokens": 1, "prompt_cache_options": {"ttl": "1h"}}
    assert site.http.post("/v1/completions", json=body).status_code == 200
    assert [submit.pins[0].n_tokens for submit in site.loop.submitted[-2:]] == [5, 2]


def test_a_breakpoint_pins_the_prompt_up_to_the_end_of_its_part(site: Site) -> None:
    messages = [message(part("maxims", "12h"), "rules", role="system"), message("a", part("question"), "b")]
    text = "<system>maxims\nrules<user>a\nquestion\nb<assistant>"
    ends = [len(text.partition(before)[0] + before) for before in ("<system>maxims", "question")]
    assert pins(site, messages) == [(ends[0], 43200.0), (ends[1], 1800.0)]
    explicit = {"mode": "explicit", "ttl": "10m"}
    assert pins(site, messages, prompt_cache_options=explicit) == [(ends[0], 43200.0), (ends[1], 600.0)]
    implicit = {"mode": "implicit", "ttl": "10m"}
    assert pins(site, messages, prompt_cache_options=implicit) == [
        (ends[0], 43200.0),
        (ends[1], 600.0),
        (len(text), 600.0),
    ]


def test_a_repeated_text_ends_where_its_own_message_does(site: Site) -> None:
    messages = [message("yes"), message("yes", role="assistant"), message(part("yes"))]
    assert pins(site, messages) == [(len("<user>yes<assistant>yes<user>yes"), 1800.0)]


def test_a_text_that_the_template_drops_ends_with_the_one_before(served_model: ServedModel, tmp_path: Path) -> None:
    template = ChatTemplate(
        "{% for m in messages %}<{{ m.content.split('</think>')[-1] | trim }}>{% endfor %}", {}, ""
    )
    messages = [message(part(" kept ")), message(part("a thought</think>"), "answer"), message(part("end"))]
    with running_site(replace(served_model, chat_template=template), tmp_path) as site:
        assert [end for end, _ in pins(site, messages)] == [len("<kept"), len("<kept"), len("<kept><answer><end")]


@pytest.mark.parametrize(("options", "n_explicit"), [({"mode": "explicit"}, 4), ({"mode": "implicit"}, 3)])
def test_the_latest_breakpoints_count(site: Site, options: dict[str, Any], n_explicit: int) -> None:
    messages = [message(part(f"text{i}")) for i in range(6)]
    ends = [len("".join(f"<user>text{j}" for j in range(i + 1))) for i in range(6)]
    found = pins(site, messages, prompt_cache_options=options)
    assert [end for end, _ in found[:n_explicit]] == ends[-n_explicit:]
    assert len(found) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"ttl": "abc"},
        {"ttl": "-5m"},
        {"ttl": "25h"},
        {"ttl": 300},
        {"mode": "sometimes"},
        {"mode": 1},
        "implicit",
        [],
    ],
    ids=str,
)
def test_wrong_options_are_refused(site: Site, options: Any) -> None:
    for mode in ({}, {"mode": "explicit"}):
        value = {**mode, **options} if isinstance(options, dict) else options
        check_refusal(post(site, HELLO, prompt_cache_options=value), "prompt_cache_options")


@pytest.mark.parametrize(
    "marker",
    [
        {"mode": "implicit"},
        {},
        {"ttl": "5m"},
        {"mode": "explicit", "ttl": "abc"},
        {"mode": "explicit", "ttl": "48h"},
        {"mode": "explicit", "ttl": 5},
        "explicit",
        True,
    ],
)
def test_wrong_breakpoints_are_refused(site: Site, marker: Any) -> None:
    marked = {"type": "text", "text": "a", "prompt_cache_breakpoint": marker}
    check_refusal(post(site, [message("b"), message(marked)]), "messages")


def test_a_breakpoint_on_another_part_than_text_is_refused(site: Site) -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}, "prompt_cache_breakpoint": {"mode": "explicit"}}
    check_refusal(post(site, [message(image)]), "messages", "unsupported_feature")
