"""An unknown field that is one letter from a known one is named in the response, and once in the log."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response

from radixkv.frontend.api.openai.schema import parse_completion
from radixkv.frontend.http import body
from radixkv.frontend.http.body import BodyReader, name_misspelt_fields
from radixkv.frontend.http.body_decoder import MAX_UNKNOWN_FIELDS
from radixkv.frontend.http.unknown_fields import KnownFields
from support.scripted_runtime import Site

HEADER = "X-RadixKV-Unknown-Field"
CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/completions", {"prompt": "a", "temprature": 0.5}, "temprature"),
        ("/v1/completions", {"prompt": "a", "temprature": 0.5, "stream": True}, "temprature"),
        ("/v1/completions", {"prompt": "a", "top__p": 0.5, "sead": None, "user": "me"}, "top__p, sead"),
        ("/v1/chat/completions", {**CHAT, "max_tokenz": 5}, "max_tokenz"),
        ("/v1/chat/completions", {**CHAT, "response_formats": {"type": "json_object"}}, "response_formats"),
        ("/generate", {"text": "a", "return_logprobs": True}, "return_logprobs"),
        ("/generate", {"text": "a", "sampling_params": {"temprature": 0.5, "top_p": 0.5, "x": 1}}, "temprature"),
        (
            "/generate",
            {"text": ["a", "b"], "sampling_params": [{"max_new_token": 5}, {"max_new_token": 6, "stops": "a"}]},
            "max_new_token, stops",
        ),
        (
            "/generate",
            {"text": "a", "return_logprobs": True, "sampling_params": {"sead": 1}},
            "return_logprobs, sead",
        ),
        ("/tokenize", {"prompt": "a", "return_token_str": True}, "return_token_str"),
        ("/v1/completions", {"prompt": "a", "user": "me", "store": True, "metadata": {}, "x": 1}, None),
        ("/v1/completions", {"prompt": "a", "tempe\nrature": 1, "temperaturé": 1}, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_misspelt_field_is_named_in_the_response(
    site: Site, path: str, fields: dict[str, Any], named: str | None
) -> None:
    reply = site.http.post(path, json=fields)
    assert reply.status_code == 200, reply.text
    assert reply.headers.get(HEADER) == named


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a", "temprature": 0.5, "top_p": 2.0}),
        ("/v1/completions", {"prompt": "a", "temprature": 0.5, "tools": [{}]}),
        ("/v1/completions", {"prompt": "a", "temprature": 0.5, "max_tokens": 1 << 20}),
        ("/generate", {"text": "a", "sampling_params": {"temprature": 0.5, "top_p": 2.0}}),
        ("/generate", {"text": "a", "sampling_params": {"temprature": 0.5, "top_p": "high"}}),
        ("/generate", {"text": "a", "sampling_params": {"temprature": 0.5, "stop_regex": "a"}}),
        ("/generate", {"text": "a", "sampling_params": [{"temprature": 0.5}, {}]}),
    ],
    ids=lambda value: str(value)[:80],
)
def test_a_misspelt_field_is_named_beside_an_error(site: Site, path: str, fields: dict[str, Any]) -> None:
    reply = site.http.post(path, json=fields)
    assert (reply.status_code, reply.headers.get(HEADER)) == (400, "temprature")


def read(reader: BodyReader, **fields: object) -> list[str]:
    """Returns the misspelt fields of a body that ``reader`` reads."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps({"prompt": "a", **fields}).encode()}

    headers = [(b"content-type", b"application/json")]
    request = Request({"type": "http", "headers": headers, "state": {}}, receive)
    asyncio.run(reader.read(request, parse_completion, 100))
    named = name_misspelt_fields(request, Response()).headers.get(HEADER)
    return [] if named is None else named.split(", ")


def test_a_misspelt_field_is_logged_once() -> None:
    lines: list[str] = []
    reader = BodyReader(1 << 20, log=lines.append)
    assert read(reader, temprature=1) == read(reader, temprature=2) == ["temprature"]
    assert read(reader, temperature=1) == []
    (line,) = lines
    assert "temprature" in line
    assert "temperature" in line
    read(reader, top__p=1)
    assert len(lines) == 2


def test_only_some_fields_of_a_body_are_compared_and_the_next_body_again() -> None:
    misspelt: dict[str, str] = {}
    others = ",".join(f'"unknown_{number}":1' for number in range(MAX_UNKNOWN_FIELDS))
    parse_completion(f'{{{others},"prompt":"a","temprature":1}}'.encode(), 100, misspelt)
    assert misspelt == {}
    parse_completion(b'{"prompt":"a","temprature":1}', 100, misspelt)
    assert misspelt == {"temprature": "temperature"}


def test_the_named_fields_of_a_list_of_objects_are_bounded(site: Site) -> None:
    name = "temperature"
    misspellings = [{name[:at] + letter + name[at:]: 1} for at in range(len(name)) for letter in "qvwxyz_"]
    assert len(misspellings) > MAX_UNKNOWN_FIELDS
    reply = site.http.post("/generate", json={"text": "a", "sampling_params": misspellings})
    assert (reply.status_code, len(reply.headers[HEADER].split(", "))) == (400, MAX_UNKNOWN_FIELDS)


def test_the_log_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MAX_LOGGED_FIELDS", 1)
    lines: list[str] = []
    reader = BodyReader(1 << 20, log=lines.append)
    assert read(reader, temprature=1, top__p=1) == ["temprature", "top__p"]
    assert read(reader, sead=1) == ["sead"]
    assert len(lines) == 1


def distance(one: str, other: str) -> int:
    """Levenshtein's distance, by its definition."""
    if not one or not other:
        return len(one) + len(other)
    return min(
        distance(one[1:], other) + 1,
        distance(one, other[1:]) + 1,
        distance(one[1:], other[1:]) + (one[0] != other[0]),
    )


@given(st.text("ab", min_size=4, max_size=6), st.text("ab", min_size=4, max_size=6))
def test_names_are_near_at_an_edit_distance_of_one(one: str, other: str) -> None:
    if one != other:
        assert (KnownFields([other]).nearest(one) == other) is (distance(one, other) == 1)
