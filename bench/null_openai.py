"""An OpenAI-compatible server that computes nothing and stamps every chunk with its time of sending.

Each request streams ``max_tokens`` chunks at a fixed interval from its arrival on. The text of a chunk has two
times, those of the arrival of the request and of the sending of the chunk, in nanoseconds of the clock that all
processes of a machine share. If the prompt is a number, the first chunk also has that many prompt token ids.
Prints its port.

    argv: seconds between chunks
"""

from __future__ import annotations

import asyncio
import sys
import time
from functools import cache
from typing import cast

import msgspec
import uvloop

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
MODELS = b'{"object":"list","data":[{"id":"null"}]}'


class Body(msgspec.Struct):
    """The fields of a request that the server reads."""

    max_tokens: int
    prompt: str

    @property
    def n_prompt_ids(self) -> int:
        """How many prompt token ids the response has."""
        return int(self.prompt) if self.prompt.isdigit() else 0


class Connection(asyncio.Protocol):
    """A client's connection, with one request at a time."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._received = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        arrived_ns = time.monotonic_ns()
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end or len(body) < _content_length(head):
            return
        self._received = b""
        if head.startswith(b"POST /v1/completions "):
            request = msgspec.json.decode(body, type=Body)
            self._transport.write(HEAD)
            self._next_at = asyncio.get_running_loop().time()
            self._send(arrived_ns, request.max_tokens, request.max_tokens, _prompt_ids(request.n_prompt_ids))
        elif head.startswith(b"GET /v1/models "):
            self._transport.write(_response(b"200 OK", MODELS))
        else:
            self._transport.write(_response(b"404 Not Found", b"{}"))

    def _send(self, arrived_ns: int, n_left: int, n_chunks: int, prompt_ids: bytes = b"null") -> None:
        is_last = n_left == 1
        reason = b'"length"' if is_last else b"null"
        event = b'data: {"choices":[{"prompt_token_ids":%s,"text":"%d:%d ","finish_reason":%s}],"usage":null}\n\n'
        self._write(event % (prompt_ids, arrived_ns, time.monotonic_ns(), reason))
        if not is_last:
            self._next_at += self._interval_s
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._next_at, self._send, arrived_ns, n_left - 1, n_chunks)
            return
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}\n\n' % n_chunks
        self._write(usage + b"data: [DONE]\n\n")
        self._transport.write(b"0\r\n\r\n")

    def _write(self, part: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))


@cache
def _prompt_ids(count: int) -> bytes:
    """Returns ``count`` token ids as JSON, null for none."""
    return msgspec.json.encode([n % 128_000 for n in range(count)] or None)


def _content_length(head: bytes) -> int:
    _, _, rest = head.lower().partition(b"content-length:")
    return int(rest.partition(b"\r")[0] or 0)


def _response(status: bytes, body: bytes) -> bytes:
    kind = b"content-type: application/json\r\ncontent-length: %d" % len(body)
    return b"HTTP/1.1 " + status + b"\r\n" + kind + b"\r\n\r\n" + body


async def serve(interval_s: float) -> None:
    """Serves until the process ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(interval_s), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(float(sys.argv[1])))
