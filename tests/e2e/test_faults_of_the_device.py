"""Steps that fail, and outputs that are not finite."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from support.breaking_runtime import DIES, HANGS, NO_MEMORY, NO_MEMORY_ONCE, NOT_FINITE_ONCE
from support.live import LIMIT_S, LiveServer, serving, wait_for, watched

NAN_TOKEN = 77
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "logit_bias": {str(NAN_TOKEN): -100}}


def send_all(live: LiveServer, *bodies: dict[str, Any]) -> list[httpx.Response]:
    """Sends requests concurrently and returns their responses."""
    with httpx.Client(base_url=live.base_url, timeout=LIMIT_S) as http, ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(lambda body: http.post("/v1/completions", json=GREEDY | body), bodies))


def prompts(n: int, *, with_pair: tuple[int, ...] = ()) -> list[list[int]]:
    """Returns prompts that share their first two pages."""
    return [[*range(100, 140), *with_pair, 200 + i] for i in range(n)]


def token_ids(reply: httpx.Response) -> list[list[int]]:
    assert reply.status_code == 200, reply.text
    return [choice["token_ids"] for choice in reply.json()["choices"]]


def code(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


@pytest.mark.nightly
def test_the_requests_of_a_step_without_memory_are_retried_alone(checked_server: LiveServer) -> None:
    healthy = {"prompt": prompts(6), "max_tokens": 12}
    (alone,) = send_all(checked_server, healthy)
    unlucky = {"prompt": prompts(6, with_pair=NO_MEMORY_ONCE), "max_tokens": 12}
    crowd = send_all(checked_server, healthy, unlucky)
    assert token_ids(crowd[0]) == token_ids(alone)
    assert token_ids(crowd[1]) == token_ids(send_all(checked_server, unlucky)[0])


@pytest.mark.nightly
def test_only_a_request_that_breaks_every_step_fails(checked_server: LiveServer) -> None:
    healthy = {"prompt": prompts(6), "max_tokens": 40}
    (alone,) = send_all(checked_server, healthy)
    for stream in (False, True):
        breaking = {"prompt": [*NO_MEMORY, 5, 6], "max_tokens": 5, "stream": stream}
        crowd, failed, again = send_all(checked_server, healthy, breaking, breaking)
        assert token_ids(crowd) == token_ids(alone)
        assert code(failed) == code(again) == (500, "device_error")


@pytest.mark.nightly
def test_one_step_that_is_not_finite_fails_no_request(checked_server: LiveServer) -> None:
    faulty = {"prompt": [*range(100, 140), *NOT_FINITE_ONCE], "max_tokens": 8}
    healthy = {"prompt": prompts(4), "max_tokens": 12}
    (alone,) = send_all(checked_server, healthy)
    crowd = send_all(checked_server, healthy, faulty)
    assert token_ids(crowd[0]) == token_ids(alone)
    assert token_ids(crowd[1]) == token_ids(send_all(checked_server, faulty)[0])


@pytest.fixture(scope="module")
def nan_server(sensitive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose checkpoint has NaN in one token's embedding."""
    folder = shutil.copytree(sensitive, tmp_path_factory.mktemp("nan") / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][NAN_TOKEN] = np.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with serving(folder, folder.parent / "errors") as live:
        yield live


@pytest.mark.nightly
def test_only_a_request_that_is_never_finite_fails(nan_server: LiveServer) -> None:
    before = nan_server.canary()
    healthy = {"prompt": prompts(6), "max_tokens": 30}
    (alone,) = send_all(nan_server, healthy)
    for prompt in ([NAN_TOKEN], [*range(100, 140), NAN_TOKEN, 5], [*range(100, 140), NAN_TOKEN]):
        crowd, failed = send_all(nan_server, healthy, {"prompt": prompt, "max_tokens": 5})
        assert token_ids(crowd) == token_ids(alone)
        assert code(failed) == (500, "numerical_error")
    streamed = send_all(nan_server, {"prompt": [NAN_TOKEN, 5], "stream": True})[0]
    assert code(streamed) == (500, "numerical_error")
    whole_batch = send_all(nan_server, {"prompt": [[5], [NAN_TOKEN]], "max_tokens": 500})[0]
    assert code(whole_batch) == (500, "numerical_error")
    wait_for(nan_server.is_idle, "pages or requests are left")
    assert nan_server.canary() == before


@pytest.mark.nightly
@pytest.mark.parametrize(("pair", "reason"), [(DIES, "code -11"), (HANGS, "silent for 5 s")])
def test_a_step_that_never_ends_or_kills_the_runtime(
    sensitive: Path, tmp_path: Path, pair: tuple[int, int], reason: str
) -> None:
    """The server cannot survive this: it reports the reason and exits."""
    with watched(sensitive, tmp_path / "errors", "--heartbeat-timeout", "5") as live:
        replies = send_all(
            live, {"prompt": [5, 6], "max_tokens": 4000}, {"prompt": [*pair], "max_tokens": 5, "stream": True}
        )
        for reply in replies:
            assert code(reply) == (503, "runtime_died")
            assert reason in reply.json()["error"]["message"]
        assert live.process.wait(timeout=LIMIT_S) == 1
        assert reason in (tmp_path / "errors").read_text().splitlines()[-1]
