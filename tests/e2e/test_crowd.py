"""Many concurrent clients, a third of which disconnect early."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.live import LIMIT_S, LiveServer, wait_for, watched

N_CLIENTS = 80
N_ROWS = 24
"""Fewer than the clients that disconnect, so that no other client is answered before they do."""
POOL_BYTES = 1 << 28
"""Enough for a thousand tokens of each client."""
N_PROMPTS = 8
SHARED = "Question: Ann has 3 apples and buys 4. How many has she?\nAnswer: 7.\n"


@pytest.fixture
def live(sensitive: Path, tmp_path: Path) -> Iterator[LiveServer]:
    flags = ("--max-num-seqs", str(N_ROWS), "--kv-cache-memory-bytes", str(POOL_BYTES))
    with watched(sensitive, tmp_path / "errors", *flags) as server:
        yield server


def body(client: int, max_tokens: int = 16) -> dict[str, Any]:
    prompt = f"{SHARED}Question: how much is {client % N_PROMPTS} + 1?\nAnswer:"
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


class Crowd:
    """Concurrent clients. A third starts first with long answers, and disconnects once all have sent requests."""

    def __init__(self, live: LiveServer, http: httpx.AsyncClient) -> None:
        self._live = live
        self._http = http
        self._is_full = asyncio.Event()
        """Set when requests occupy all rows."""
        self._is_counted = asyncio.Event()

    async def run_all(self) -> list[str | None]:
        """Returns the streamed texts; None for clients that disconnected."""
        _, *texts = await asyncio.gather(self._count(), *map(self._ask, range(N_CLIENTS)))
        return texts

    async def _count(self) -> None:
        await self._wait_for_metrics("num_requests_running", minimum=N_ROWS)
        self._is_full.set()
        await self._wait_for_metrics("num_requests_running", "num_requests_waiting", minimum=N_CLIENTS)
        self._is_counted.set()

    async def _wait_for_metrics(self, *names: str, minimum: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while sum(await asyncio.to_thread(self._live.metrics, *names)) < minimum:
                await asyncio.sleep(0.02)

    async def _ask(self, client: int) -> str | None:
        if client % 3 == 0:
            await self._read_first_event(body(client, max_tokens=4000))
            return None
        await self._is_full.wait()
        return await self._read_text(body(client))

    async def _read_first_event(self, fields: dict[str, Any]) -> None:
        async with self._events(fields) as events:
            assert "choices" in await anext(events)
            await self._is_counted.wait()

    async def _read_text(self, fields: dict[str, Any]) -> str:
        async with self._events(fields) as events:
            return "".join([event["choices"][0]["text"] async for event in events])

    @contextlib.asynccontextmanager
    async def _events(self, fields: dict[str, Any]) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        async with (
            self._http.stream("POST", "/v1/completions", json={**fields, "stream": True}) as reply,
            contextlib.aclosing(reply.aiter_lines()) as lines,
            contextlib.aclosing(self._parsed(lines)) as events,
        ):
            yield events

    async def _parsed(self, lines: AsyncIterator[str]) -> AsyncGenerator[dict[str, Any], None]:
        async for line in lines:
            if line == "data: [DONE]":
                return
            if line:
                yield json.loads(line.removeprefix("data: "))
        raise AssertionError("the stream ended without its end")


@pytest.mark.nightly
def test_many_streams(live: LiveServer) -> None:
    alone = [live.complete(**body(client))["choices"][0]["text"] for client in range(N_PROMPTS)]
    before = live.canary()
    leftovers = live.leftovers_at_rest()

    async def crowd() -> list[str | None]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=live.base_url, timeout=LIMIT_S, limits=limits) as http:
            return await Crowd(live, http).run_all()

    texts = asyncio.run(crowd())
    assert texts == [None if client % 3 == 0 else alone[client % N_PROMPTS] for client in range(N_CLIENTS)]
    wait_for(live.is_idle, "pages or requests are left")
    assert live.canary() == before
    wait_for(lambda: live.leftovers_at_rest() == leftovers, "something is left")
