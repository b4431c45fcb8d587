"""Steps that fail, and numbers that are none."""

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
from support.live import LIMIT_S, Live, serving, wait_for, watched

SICK = 77
GREEDY = {
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
    "logit_bias": {str(SICK): -100},
}


def together(live: Live, *bodies: dict[str, Any]) -> list[httpx.Response]:
    """The replies to requests that are sent at the same time."""
    with httpx.Client(base_url=live.base_url, timeout=LIMIT_S) as http, ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(lambda body: http.post("/v1/completions", json=GREEDY | body), bodies))


def prompts(n: int, *, with_pair: tuple[int, ...] = ()) -> list[list[int]]:
    """All begin with the same two pages."""
    return [[*range(100, 140), *with_pair, 200 + i] for i in range(n)]


def ids(reply: httpx.Response) -> list[list[int]]:
    assert reply.status_code == 200, reply.text
    return [choice["token_ids"] for choice in reply.json()["choices"]]


def code(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


def test_a_step_without_memory_is_tried_again_in_halves(unharmed: Live) -> None:
    healthy = {"prompt": prompts(6), "max_tokens": 12}
    (alone,) = together(unharmed, healthy)
    unlucky = {"prompt": prompts(6, with_pair=NO_MEMORY_ONCE), "max_tokens": 12}
    crowd = together(unharmed, healthy, unlucky)
    assert ids(crowd[0]) == ids(alone)
    assert ids(crowd[1]) == ids(together(unharmed, unlucky)[0])


def test_a_request_that_breaks_every_step_ends_alone(unharmed: Live) -> None:
    healthy = {"prompt": prompts(6), "max_tokens": 40}
    (alone,) = together(unharmed, healthy)
    for stream in (False, True):
        breaking = {"prompt": [*NO_MEMORY, 5, 6], "max_tokens": 5, "stream": stream}
        crowd, failed, again = together(unharmed, healthy, breaking, breaking)
        assert ids(crowd) == ids(alone)
        assert code(failed) == code(again) == (500, "device_error")


def test_numbers_that_are_none_once_cost_nobody_the_answer(unharmed: Live) -> None:
    sick = {"prompt": [*range(100, 140), *NOT_FINITE_ONCE], "max_tokens": 8}
    healthy = {"prompt": prompts(4), "max_tokens": 12}
    (alone,) = together(unharmed, healthy)
    crowd = together(unharmed, healthy, sick)
    assert ids(crowd[0]) == ids(alone)
    assert ids(crowd[1]) == ids(together(unharmed, sick)[0])


@pytest.fixture(scope="module")
def sick(sensitive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server whose checkpoint has NaN in one token's embedding."""
    folder = shutil.copytree(sensitive, tmp_path_factory.mktemp("nan") / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][SICK] = np.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with serving(folder, folder.parent / "errors") as live:
        yield live


def test_numbers_that_are_none_for_ever_end_their_request_alone(sick: Live) -> None:
    before = sick.canary()
    healthy = {"prompt": prompts(6), "max_tokens": 30}
    (alone,) = together(sick, healthy)
    for prompt in ([SICK], [*range(100, 140), SICK, 5], [*range(100, 140), SICK]):
        crowd, failed = together(sick, healthy, {"prompt": prompt, "max_tokens": 5})
        assert ids(crowd) == ids(alone)
        assert code(failed) == (500, "numerical_error")
    streamed = together(sick, {"prompt": [SICK, 5], "stream": True})[0]
    assert code(streamed) == (500, "numerical_error")
    whole_batch = together(sick, {"prompt": [[5], [SICK]], "max_tokens": 500})[0]
    assert code(whole_batch) == (500, "numerical_error")
    wait_for(sick.is_idle, "pages or requests are left")
    assert sick.canary() == before


@pytest.mark.parametrize(("pair", "says"), [(HANGS, "silent for 5 s"), (DIES, "code -11")])
def test_a_step_that_never_ends_or_kills_the_runtime(
    sensitive: Path, tmp_path: Path, pair: tuple[int, int], says: str
) -> None:
    """A server cannot survive that: it says so, and ends."""
    with watched(sensitive, tmp_path / "errors", "--heartbeat-timeout", "5") as live:
        replies = together(
            live, {"prompt": [5, 6], "max_tokens": 4000}, {"prompt": [*pair], "max_tokens": 5, "stream": True}
        )
        for reply in replies:
            assert code(reply) == (503, "runtime_died")
            assert says in reply.json()["error"]["message"]
        assert live.process.wait(timeout=LIMIT_S) == 1
        assert says in (tmp_path / "errors").read_text().splitlines()[-1]
