"""What waits for the requests of now is called once the last of them has ended, and waits for no later one."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.frontend.http.open_requests import NotedRequests, OpenRequests
from support.cases import examples


@given(steps=st.lists(st.sampled_from(["begin", "wait", 0, 1, 2]), max_size=40))
@examples(300)
def test_calls_come_when_all_requests_of_then_have_ended(steps: list[str | int]) -> None:
    """Compared with a set of requests for each call."""
    requests, called = OpenRequests(), set[int]()
    is_open: list[int] = []
    waited_for: list[set[int]] = []
    for step in [*steps, *[0] * len(steps)]:
        if step == "begin":
            is_open.append(requests.begin())
        elif step == "wait":
            waited_for.append(set(is_open))
            requests.after_open(partial(called.add, len(waited_for) - 1))
        elif isinstance(step, int) and step < len(is_open):
            requests.end(is_open.pop(step))
        assert called == {number for number, some in enumerate(waited_for) if some.isdisjoint(is_open)}
    assert len(called) == len(waited_for)


@pytest.mark.parametrize(
    ("scope", "is_noted"),
    [
        ({"type": "http", "method": "POST"}, True),
        ({"type": "http", "method": "GET"}, False),
        ({"type": "lifespan"}, False),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_requests_that_may_name_a_model_are_noted_to_their_end(
    scope: dict[str, Any], is_noted: bool, fails: bool
) -> None:
    requests, called = OpenRequests(), list[str]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        requests.after_open(lambda: called.append("call"))
        assert called == ([] if is_noted else ["call"])
        if fails:
            raise ConnectionError

    async def run() -> None:
        never: Any = None
        await NotedRequests(app, requests)(scope, never, never)

    if fails:
        with pytest.raises(ConnectionError):
            asyncio.run(run())
    else:
        asyncio.run(run())
    assert called == ["call"]
