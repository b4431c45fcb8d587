"""A stop string that only matches at the end of an answer, where an incomplete character becomes U+FFFD."""

from __future__ import annotations

import json

import pytest

from support.scripted_runtime import Site


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_string_at_the_very_end_is_the_reason(site: Site, streams: bool) -> None:
    body = {"prompt": "é", "max_tokens": 1, "temperature": 0, "stop": "\N{REPLACEMENT CHARACTER}"}
    reply = site.http.post("/v1/completions", json={**body, "stream": streams}).text
    events = [line.removeprefix("data: ") for line in reply.split("\n\n") if line != "data: [DONE]" and line]
    choices = [json.loads(event)["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == ""
    assert choices[-1]["finish_reason"] == "stop"
