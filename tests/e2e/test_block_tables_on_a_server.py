"""``/cache/tables`` and ``radixkv explain --request`` on a real server, while answers with one prefix stream."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

from radixkv.cli import main
from support.live import LiveServer, wait_for

SHARED = "Question: Ann has 3 apples and buys 4. How many has she?\nAnswer: 7.\n" * 8

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("exact_and_idle_afterwards")]


@contextmanager
def streaming(server: LiveServer, request_id: str, **body: Any) -> Iterator[str]:
    """Streams an answer that goes on; yields the id of the reply once the first token has come."""
    body = {"max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True, **body}
    headers = {"X-Request-Id": request_id}
    with server.http.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])["id"]
                return


def shown(server: LiveServer, name: str) -> list[dict[str, Any]]:
    reply = server.http.get("/cache/tables", params={"request": name})
    assert reply.status_code == 200, reply.text
    requests: list[dict[str, Any]] = reply.json()["requests"]
    return requests


def test_two_streams_with_one_prefix_have_its_pages_in_common(
    server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as streams:
        first = streams.enter_context(streaming(server, "first", prompt=f"{SHARED} One"))
        second = streams.enter_context(streaming(server, "second", prompt=f"{SHARED} Two", n=2))
        page_size = server.http.get("/server_info").json()["page_size"]
        tables = [
            choice["table"]
            for name in (first, second)
            for (one,) in [shown(server, name)]
            for choice in one["choices"]
        ]
        n_shared = len(server.http.post("/tokenize", json={"prompt": SHARED}).json()["tokens"]) // page_size
        heads = {tuple(page["physical"] for page in table[: n_shared - 1]) for table in tables}
        assert len(heads) == 1, "all have the pages of the prefix"
        counts = Counter(page["physical"] for table in tables for page in table)
        for table in tables:
            assert all(page["references"] == 3 for page in table[: n_shared - 1])
            assert all(page["filled"] == page_size for page in table if page["kind"] == "tree")
            assert counts[table[-1]["physical"]] == 1, "each writes to a page of its own"
        listed = server.http.get("/cache/tables").json()
        assert {one["request_id"] for one in listed["requests"]} >= {"first", "second"}
        pool = listed["pool"]
        assert (
            sum(pool.get(part, 0) for part in ("free", "cached", "leased", "own", "copied", "windows"))
            == pool["pages"]
        )
        assert main(["explain", "--request", "second", "--base-url", server.base_url]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()[:1].isdigit()]
        assert [row[:4] for row in rows[: n_shared - 1]] == [
            [str(entry), str(page), f"{page_size}/{page_size}", "3"] for entry, page in enumerate(next(iter(heads)))
        ]
    for name in (first, second, "first", "nobody"):
        reply = partial(server.http.get, "/cache/tables", params={"request": name})
        wait_for(lambda reply=reply: reply().status_code == 404, "a request has ended and is shown")
        assert reply().json()["error"]["code"] == "request_not_found"
