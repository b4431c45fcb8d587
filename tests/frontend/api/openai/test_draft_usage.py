"""Accepted and rejected drafts in the usage of chats and completions."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.wire.messages import DraftUse
from support.scripted_runtime import Site
from support.site_requests import asks, events, post

PATHS = ("/v1/completions", "/v1/chat/completions")
STREAMED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def reasoning(path: str) -> dict[str, int]:
    return {"reasoning_tokens": 0} if path == "/v1/chat/completions" else {}


def counts(n_prompts: int = 1) -> dict[str, int]:
    return {"accepted_prediction_tokens": 5 * n_prompts, "rejected_prediction_tokens": 2 * n_prompts}


def details(usage: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = usage.get("completion_tokens_details", {})
    return found


@pytest.mark.parametrize("path", PATHS)
def test_usage_counts_drafts(site: Site, path: str) -> None:
    site.loop.draft_use = DraftUse(5, 2)
    body = asks("hello")[path]
    assert details(post(site, path, **body)["usage"]) == reasoning(path) | counts()
    site.loop.step_s = 0.02
    first, *_, last = events(site, path, **body, **STREAMED)
    assert details(last["usage"]) == reasoning(path) | counts()
    assert details(first["usage"]) == reasoning(path), "they are known at the end"


def test_drafts_of_several_prompts_are_added(site: Site) -> None:
    site.loop.draft_use = DraftUse(5, 2)
    usage = post(site, "/v1/completions", prompt=["one", "two", "three"], max_tokens=2)["usage"]
    assert usage["completion_tokens_details"] == counts(3)


@pytest.mark.parametrize("path", PATHS)
def test_without_drafts_usage_has_no_counts_of_them(site: Site, path: str) -> None:
    usage = post(site, path, **asks("hello")[path])["usage"]
    assert usage.get("completion_tokens_details") == (reasoning(path) or None)
