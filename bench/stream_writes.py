"""Processor time of one part of a stream: written to the connection directly, or sent through ASGI (decision 21).

A server in this process streams the same parts both ways, in turn, to a client in another thread; the time is that
of the server's thread. Its app has the layers of the real one.

    python bench/stream_writes.py --output-file bench/results/stream_writes.jsonl
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from statistics import median

import uvicorn
import uvloop
from result_lines import report, script_parser
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixkv.frontend.http.auth import LocalOnly
from radixkv.frontend.http.body import BodyReader
from radixkv.frontend.http.connection import Connection
from radixkv.frontend.http.disconnect import cancel_on_disconnect
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.http.sse import EventStream, event
from radixkv.lab.bench.environment import provenance

PART = event(
    {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": " apples",
                "logprobs": None,
                "finish_reason": None,
                "stop_reason": None,
                "token_ids": [7],
            }
        ],
    }
)


class AsgiStream(Response):
    """``EventStream`` with every part sent through ASGI."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await cancel_on_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for part in events:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def main() -> None:
    parser = script_parser(__doc__, requires_output_file=True)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--parts", type=int, default=20_000, help="per stream")
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pairs = runner.run(measure(arguments.pairs, arguments.parts))
    ratios = [asgi / direct for direct, asgi in pairs]
    line = {
        "benchmark": "stream_writes",
        "direct_us_per_part": round(median(direct for direct, _ in pairs), 2),
        "asgi_us_per_part": round(median(asgi for _, asgi in pairs), 2),
        "asgi_minus_direct_us": round(median(asgi - direct for direct, asgi in pairs), 2),
        "ratio_median": round(median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "pairs": [[round(direct, 2), round(asgi, 2)] for direct, asgi in pairs],
    }
    report(arguments.output_file, line, provenance())


async def measure(n_pairs: int, n_parts: int) -> list[tuple[float, float]]:
    """Returns microseconds per part, directly and through ASGI."""

    async def parts() -> AsyncGenerator[bytes, None]:
        for _ in range(n_parts):
            await asyncio.sleep(0)  # each part is written in a turn of its own, as those of a slow model are
            yield PART

    app = DocumentedApp(BodyReader(0), middleware=[Middleware(LocalOnly, origins=())])

    @app.get("/direct")
    async def direct(request: Request) -> Response:
        return EventStream(parts())

    @app.get("/asgi")
    async def asgi(request: Request) -> Response:
        return AsgiStream(parts())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            app, http=Connection, ws="none", lifespan="off", log_level="error", access_log=False
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        port = listener.getsockname()[1]

        async def measured(path: str) -> float:
            started = time.thread_time()
            await asyncio.to_thread(read_stream, port, path)
            return (time.thread_time() - started) / n_parts * 1e6

        await measured("/direct")  # the first request imports and allocates
        pairs = []
        for index in range(n_pairs):
            times = {path: await measured(path) for path in ("/direct", "/asgi")[:: 1 if index % 2 else -1]}
            pairs.append((times["/direct"], times["/asgi"]))
        server.should_exit = True
        await serving
    return pairs


def read_stream(port: int, path: str) -> None:
    """Reads a whole stream and discards it."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        while client.recv(1 << 20):
            pass


if __name__ == "__main__":
    main()
