"""Tests with instructor, which takes pydantic models from calls of tools, from JSON and from schemas."""

from __future__ import annotations

import os

import instructor
import pytest
from openai import OpenAI
from pydantic import BaseModel

from support.errands import PARCEL

Mode = instructor.Mode
MODES = [Mode.TOOLS, Mode.JSON, Mode.JSON_SCHEMA, Mode.MD_JSON, Mode.RESPONSES_TOOLS]
SETTINGS = {
    "model": "embedded",
    "messages": [{"role": "user", "content": PARCEL}],
    "temperature": 0,
    "max_tokens": 100,
    "max_retries": 0,
}


class Parcel(BaseModel):
    colour: str
    count: int


@pytest.fixture(params=MODES, ids=lambda mode: mode.value)
def client(request: pytest.FixtureRequest) -> instructor.Instructor:
    server = OpenAI(base_url=os.environ["SERVER"] + "/v1", api_key=os.environ["KEY"], max_retries=0, timeout=60)
    return instructor.from_openai(server, mode=request.param)


def test_a_model(client: instructor.Instructor) -> None:
    found = client.create(response_model=Parcel, **SETTINGS)
    assert (found.colour, found.count) == ("red", 12)


def test_a_partial_model_grows_to_the_whole_one(client: instructor.Instructor) -> None:
    *earlier, last = client.create_partial(response_model=Parcel, **SETTINGS)
    assert (last.colour, last.count) == ("red", 12)
    assert any(partial.count is None for partial in earlier)
