"""The wait for the tiers below the device, after which a request that only computes a prompt is answered."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from radixkv.errors import RuntimeDied
from radixkv.frontend import stored_prompts
from radixkv.frontend.stored_prompts import until_stored
from radixkv.wire.cache_messages import Stored
from support.running_site import site_fixture
from support.scripted_runtime import HOST, ScriptedLoop, Site
from support.site_requests import check_refusal, post

host_site = site_fixture(ready=ScriptedLoop(host=HOST).ready)


def test_a_request_that_waits_for_the_tiers_is_in_flight(host_site: Site) -> None:
    """So a server that ends waits for it, and does not throw the computed prompt away."""
    loop = host_site.loop
    loop.host, loop.is_storing = HOST, True
    with ThreadPoolExecutor(1) as pool:
        try:
            reply = pool.submit(post, host_site, "/v1/completions", prompt="x" * 40, max_tokens=0)
            while not loop.n_stored_asked:
                time.sleep(0.001)
            assert not host_site.client.is_idle
            assert not reply.done()
        finally:
            loop.is_storing = False
        assert reply.result()["usage"]["prompt_tokens_details"]["stored_tokens"] == {"host": 32}
    host_site.call(asyncio.wait_for(host_site.client.idle(), 60.0))


@pytest.mark.parametrize(
    ("field", "value"),
    [("logprobs", 0), ("prompt_logprobs", 0), ("stream", True), ("n", 0), ("n", -1), ("temperature", -1)],
)
def test_what_asks_for_output_or_is_wrong_is_refused_by_name(host_site: Site, field: str, value: object) -> None:
    reply = host_site.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 0, field: value})
    check_refusal(reply, field, "invalid_request")


def test_how_a_later_request_answers_does_not_count(host_site: Site) -> None:
    answers = {"n": 3, "temperature": 0.5, "min_tokens": 5, "stop": "b", "seed": 7}
    assert len(post(host_site, "/v1/completions", prompt="x", max_tokens=0, **answers)["choices"]) == 1


def test_a_prompt_that_is_only_computed_is_not_streamed_by_generate(host_site: Site) -> None:
    body = {"text": "x", "sampling_params": {"max_new_tokens": 0}, "stream": True}
    check_refusal(host_site.http.post("/generate", json=body), "stream", "invalid_request")


class _Group:
    """A group of one prompt, of which the tiers get a token more with each question, until the runtime is gone."""

    def __init__(self, n_answers: int) -> None:
        self._numbers = iter(range(n_answers))

    async def stored(self, index: int) -> Stored:
        assert index == 3
        for number in self._numbers:
            return Stored("s", number, 0, is_storing=True)
        raise RuntimeDied("the runtime has ended")


def wait(group: _Group) -> Stored:
    async def waiting() -> Stored:
        return await asyncio.wait_for(until_stored(group, 3, time.monotonic()), 60.0)  # type: ignore[arg-type]

    return asyncio.run(waiting())


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_prompts, "LIMIT_S", 0.05)


def test_a_runtime_that_fails_meanwhile_leaves_what_was_known() -> None:
    assert wait(_Group(3)).n_in_host == 2
    assert wait(_Group(0)).n_in_host == 0


@pytest.mark.usefixtures("brief")
def test_a_tier_that_is_never_done_is_not_waited_for_longer_than_the_limit() -> None:
    assert wait(_Group(1_000_000)).is_storing
