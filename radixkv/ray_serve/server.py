"""A replica of Ray Serve that runs a ``radixkv serve`` process and forwards requests to it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import ray

from radixkv.errors import RadixKVError, RequestError, RuntimeDied
from radixkv.frontend.http.error_response import retry_after
from radixkv.frontend.http.errors import error_body, status_of
from radixkv.processes.server_process import running_server
from radixkv.ray_serve.messages import ForwardedRequest, NotTaken, ReplyHead
from radixkv.ray_serve.server_gpus import check_gpus

NOT_TAKEN_CODES = frozenset({"queue_full", "draining", "runtime_restarting"})
"""Codes of a 503 by which a server says that it has not begun a request."""
HEALTH_LIMIT_S = 5.0
DROPPED_HEADERS = frozenset(
    {"host", "connection", "content-length", "transfer-encoding", "keep-alive", "accept-encoding", "date", "server"}
)
"""Headers of one connection, and those that each server adds itself; they are not forwarded."""
KEY_HEADERS = frozenset({"authorization", "x-api-key"})


class ServerLost(RadixKVError):
    """The server process of a replica has ended, or does not answer."""


class Server:
    """A ``radixkv serve`` process with a port of its own, which only those who know its API key can use.

    Args:
        flags: of ``radixkv serve``, all but those of address and key.
        api_key_file: file with the key that clients must send; None: clients need none.

    Raises:
        ConfigError: see ``check_gpus``.
        ServerFailed: the server ended, or was not ready in time; the text has the last line of its log.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, flags: Sequence[str], api_key_file: str | None = None
    ) -> None:
        self._clients_have_key = api_key_file is not None
        self._key = secrets.token_urlsafe() if api_key_file is None else Path(api_key_file).read_text().strip()
        self._stack = AsyncExitStack()
        check_gpus(flags, len(ray.get_runtime_context().get_accelerator_ids()["GPU"]))
        self._address = await self._stack.enter_async_context(
            running_server(flags, host=ray.util.get_node_ip_address(), environment={"RADIXKV_API_KEY": self._key})
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=HEALTH_LIMIT_S)
        self._session = await self._stack.enter_async_context(
            aiohttp.ClientSession(
                self._address,
                timeout=timeout,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
                auto_decompress=False,
            )
        )

    def record_replica_metadata(self) -> dict[str, Any]:
        """Returns what the request router needs to ask the server. Called by Ray Serve once."""
        return {"address": self._address, "api_key": self._key}

    async def check_health(self) -> None:
        """Raises ``ServerLost`` if the process has ended or hangs; Ray Serve, which calls this, then replaces it.

        A server that drains or starts its runtime again is healthy: it answers.
        """
        try:
            async with self._session.get("/health", timeout=aiohttp.ClientTimeout(total=HEALTH_LIMIT_S)):
                pass
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerLost(f"the server at {self._address} does not answer: {error!r}") from None

    async def forward(self, request: ForwardedRequest) -> AsyncIterator[ReplyHead | NotTaken | bytes]:
        """Sends a request to the server, and yields the head of its reply and then the pieces of its body.

        Yields ``NotTaken`` alone if the server has not begun the request. If the caller stops reading, the server
        aborts the request.
        """
        dropped = DROPPED_HEADERS if self._clients_have_key else DROPPED_HEADERS | KEY_HEADERS
        headers = _without(request.headers, dropped)
        if not self._clients_have_key:
            headers.append(("Authorization", f"Bearer {self._key}"))
        try:
            async with self._session.request(
                request.method, request.path, data=request.body or None, headers=headers
            ) as reply:
                head = _without(reply.headers.items(), DROPPED_HEADERS)
                if reply.status == 503 and _code(body := await reply.read()) in NOT_TAKEN_CODES:
                    yield NotTaken(503, head, body)
                    return
                yield ReplyHead(reply.status, head)
                if reply.status == 503:
                    yield body
                    return
                async for piece in reply.content.iter_any():
                    yield piece
        except aiohttp.ClientConnectorError:
            error = RuntimeDied(f"the server at {self._address} is gone, and nothing was sent to it; try again")
            yield not_taken(error, request.path)

    async def __del__(self) -> None:
        """Stops the server: running requests may finish. Called by Ray Serve when the replica is drained."""
        await self._stack.aclose()


def not_taken(error: RequestError, path: str) -> NotTaken:
    """Returns an error in the form of the API of ``path``."""
    headers = [("Content-Type", "application/json"), *retry_after(error).items()]
    return NotTaken(status_of(error), headers, msgspec.json.encode(error_body(error, path)))


def _without(headers: Iterable[tuple[str, str]], dropped: Collection[str]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers if name.lower() not in dropped]


def _code(body: bytes) -> object:
    try:
        return msgspec.json.decode(body)["error"]["code"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return None
