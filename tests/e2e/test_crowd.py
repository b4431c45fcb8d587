"""Two hundred clients at once, of whom a third leaves early."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.live import Live, open_files, wait_for, watched

N_CLIENTS = 200
N_PROMPTS = 8
SHARED = "Question: Ann has 3 apples and buys 4. How many has she?\nAnswer: 7.\n"


@pytest.fixture
def live(sensitive: Path, tmp_path: Path) -> Iterator[Live]:
    with watched(sensitive, tmp_path / "errors", "--max-num-seqs", "64") as server:
        yield server


def body(client: int) -> dict[str, Any]:
    prompt = f"{SHARED}Question: how much is {client % N_PROMPTS} + 1?\nAnswer:"
    return {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}


async def answer(http: httpx.AsyncClient, client: int, is_counted: asyncio.Event) -> str | None:
    """The streamed text; None for a client that leaves after its first event, once all have been counted."""
    text = ""
    async with (
        http.stream("POST", "/v1/completions", json={**body(client), "stream": True}) as reply,
        contextlib.aclosing(reply.aiter_lines()) as lines,
    ):
        async for line in lines:
            if line == "data: [DONE]":
                return text
            if line:
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                if client % 3 == 0:
                    await is_counted.wait()
                    return None
    raise AssertionError("the stream ended without its end")


async def peak_of(live: Live, n_files: int, is_counted: asyncio.Event) -> float:
    """Lets the runtime go on once everybody is connected; the most requests that it then had at once."""
    while len(open_files(live.process.pid)) < n_files + N_CLIENTS:
        await asyncio.sleep(0.05)
    os.kill(live.runtime_pid, signal.SIGCONT)
    peak, deadline = 0.0, time.monotonic() + 20
    while peak < N_CLIENTS and time.monotonic() < deadline:
        n_running, n_waiting = await asyncio.to_thread(live.metrics, "num_requests_running", "num_requests_waiting")
        peak = max(peak, n_running + n_waiting)
    is_counted.set()
    return peak


def test_two_hundred_streams(live: Live, record_property: pytest.RecordProperty) -> None:
    alone = [live.complete(**body(client))["choices"][0]["text"] for client in range(N_PROMPTS)]
    before = live.canary()
    wait_for(lambda: not live.is_answering(), "a reply does not end")
    remains = live.remains()
    n_files = len(open_files(live.process.pid))
    os.kill(live.runtime_pid, signal.SIGSTOP)

    async def crowd() -> tuple[float, list[str | None]]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=live.base_url, timeout=60, limits=limits) as http:
            is_counted = asyncio.Event()
            peak, *texts = await asyncio.gather(
                peak_of(live, n_files, is_counted),
                *(answer(http, client, is_counted) for client in range(N_CLIENTS)),
            )
            return peak, texts

    peak, texts = asyncio.run(crowd())
    record_property("peak_concurrency", peak)
    assert peak == N_CLIENTS
    assert texts == [None if client % 3 == 0 else alone[client % N_PROMPTS] for client in range(N_CLIENTS)]
    wait_for(live.is_idle, "pages or requests are left")
    assert live.canary() == before
    wait_for(lambda: live.remains() == remains, "something is left")
