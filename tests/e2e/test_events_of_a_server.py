"""A server whose cache events the subscriber of docs/events.md follows, as a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
import zmq

from support.event_subscriber import event_flags, following
from support.failed_start import failed_start_error
from support.live import LIMIT_S, LiveServer, wait_for

Start = Callable[..., AbstractContextManager[LiveServer]]
STORY = "A farmer has 12 hens, and each of them lays 5 eggs a week. How many eggs does he get in a month? " * 3
TIERS = ("--host-memory", "64MiB", "--max-total-tokens", "512", "--max-num-seqs", "8")


@pytest.fixture
def endpoints(tmp_path: Path) -> tuple[str, str]:
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays"


def pages_of(server: LiveServer, prompt: str) -> dict[str, int]:
    (found,) = server.http.post("/cache/match", json={"prompt": prompt}).json()["prompts"]
    return {tier: n_tokens // 16 for tier, n_tokens in found["matched_tokens"].items()}


@pytest.mark.nightly
def test_subscribers_know_what_each_tier_has(start: Start, endpoints: tuple[str, str], tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    with (
        start(*TIERS, "--cache-dir", cache, *event_flags(endpoints)) as server,
        following(endpoints, tmp_path) as first,
    ):
        assert server.http.get("/server_info").json()["kv_events"]["endpoint"] == endpoints[0]
        with zmq.Context() as context, context.socket(zmq.REQ) as asking:
            asking.connect(endpoints[1])
            asking.send(b"\xff" * 8)
            assert asking.poll(1000 * LIMIT_S), "a number beyond the buffer ends the server"
        server.complete(prompt=STORY, max_tokens=1)
        n_pages = pages_of(server, STORY)["device"]
        assert n_pages > 4
        expected = {"GPU": n_pages, "CPU": n_pages, "STORAGE": n_pages}
        wait_for(lambda: first.counts() == expected, f"{first.counts()} are not {expected}")
        server.complete(prompt=STORY, max_tokens=1, cache_salt="hers")
        expected = {"GPU": 2 * n_pages, "CPU": 2 * n_pages, "STORAGE": 2 * n_pages}
        wait_for(lambda: first.counts() == expected, f"{first.counts()} are not {expected}")
        for animal in ("goats", "ducks", "geese", "cows", "sheep", "pigs"):
            server.complete(prompt=STORY.replace("A farmer", f"The {animal} of a farmer"), max_tokens=1)
        wait_for(lambda: len(set(first.counts().values())) == 2, "the other tiers have no more than the device")
        with following(endpoints, tmp_path) as late:
            wait_for(lambda: late.counts() == first.counts(), f"{late.counts()} are not {first.counts()}")
            server.http.post("/flush_cache")
            wait_for(lambda: {*first.counts().values(), *late.counts().values()} == {0}, "something is left")
            server.complete(prompt=STORY, max_tokens=1)
            expected = {"GPU": n_pages, "CPU": n_pages, "STORAGE": n_pages}
            wait_for(lambda: first.counts() == late.counts() == expected, "what comes after a flush is missing")
        numbers = first.numbers()
        assert numbers == list(range(numbers[-1] + 1)), "every batch came, in order"


@pytest.mark.nightly
def test_a_subscriber_notices_a_restart_and_topics_are_sent(
    start: Start, endpoints: tuple[str, str], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        events = stack.enter_context(context.socket(zmq.SUB))
        events.setsockopt(zmq.SUBSCRIBE, b"kv@")
        events.connect(endpoints[0])
        with start(*event_flags(endpoints, topic="kv@x")) as server:
            subscriber = stack.enter_context(following(endpoints, tmp_path))
            server.complete(prompt=STORY, max_tokens=1)
            n_pages = pages_of(server, STORY)["device"]
            wait_for(lambda: subscriber.counts().get("GPU") == n_pages, "the pages are not known")
            assert events.poll(1000 * LIMIT_S)
            assert events.recv_multipart()[0] == b"kv@x"
        with start(*event_flags(endpoints)) as server:
            server.complete(prompt=STORY[:150], max_tokens=1)
            n_fewer = pages_of(server, STORY)["device"]
            assert 0 < n_fewer < n_pages
            wait_for(lambda: subscriber.counts().get("GPU") == n_fewer, "the pages of before the restart are left")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ('{"enable_kv_cache_events": true, "endpoint": "TAKEN"}', ["the endpoint", "it is taken"]),
        ('{"publisher": "zmq", "endpoint": "ipc:///no/folder/x"}', ["the endpoint", "cannot be bound"]),
    ],
)
def test_an_endpoint_that_cannot_be_bound_ends_the_start_with_one_line(
    tmp_path: Path, config: str, parts: list[str]
) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        config = config.replace("TAKEN", f"tcp://127.0.0.1:{port}")
        error = failed_start_error(tmp_path, "--kv-events-config", config)
    assert all(part in error for part in parts), error
