"""Requests to one HTTP server, with its base URL, API key and time limits."""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import aiohttp

from radixkv.client.errors import BadReply, StatusError
from radixkv.errors import ConfigError

SILENCE_LIMIT_S = 600.0
"""Default limit of the time without a byte from the server."""
CONNECT_LIMIT_S = 30.0
"""Limit of the time to connect."""
KEEP_ALIVE_S = 3.0
"""Idle time after which connections are closed.

It is shorter than the servers' own (uvicorn: 5 s): a request on a connection that the server closes would fail.
"""
LARGE_BODY_BYTES = 1 << 18
"""Longer requests are sent in pieces, to keep the event loop free."""


def server_address(base_url: str) -> str:
    """Returns a server's address without the final ``/v1`` that ``base_url`` may have.

    Raises:
        ConfigError: ``base_url`` is not an HTTP URL with a host.
    """
    address = base_url.rstrip("/").removesuffix("/v1")
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"base URL {base_url!r} is not an address; give one such as http://127.0.0.1:8000")
    try:
        parts = urlsplit(address)
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"base URL {base_url!r} has no usable port: {error}") from None
    if not parts.hostname:
        raise ConfigError(f"base URL {base_url!r} names no host; give one such as http://127.0.0.1:8000")
    return address


class HTTPClient:
    """Client of one server; used as ``async with``.

    Args:
        base_url: the server's address, with or without the final ``/v1``.
        api_key: sent as ``Authorization: Bearer``.
        use_environment: whether proxies and certificates of the environment apply.
        silence_limit_s: a request fails if the server sends nothing for longer.

    Raises:
        ConfigError: ``base_url`` is no HTTP URL.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        use_environment: bool = False,
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        self.address = server_address(base_url)
        self.silence_limit_s = silence_limit_s
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._use_environment = use_environment

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            # Compression would change the pieces in which a stream arrives.
            headers={**self._headers, "Accept-Encoding": "identity"},
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=min(CONNECT_LIMIT_S, self.silence_limit_s),
                sock_read=self.silence_limit_s,
            ),
            trust_env=self._use_environment,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()

    async def request(
        self, method: str, path: str, body: bytes | None = None, *, limit_s: float | None = None
    ) -> bytes:
        """Sends a request, with ``body`` as JSON, and returns the reply's body.

        Args:
            method: the HTTP method.
            path: the endpoint.
            body: JSON; None: the request has no body.
            limit_s: limit of the request's total time. None: only that of silence.

        Raises:
            BadReply: the request failed.
        """
        limits = self._session.timeout if limit_s is None else aiohttp.ClientTimeout(total=limit_s)
        with _transport_errors():
            async with self._session.request(
                method, self.address + path, data=body, headers=_json_headers(body), timeout=limits
            ) as reply:
                text = await reply.read()
        if not reply.ok:
            raise StatusError(reply.status, text)
        return text

    async def stream(self, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """Posts ``body`` as JSON and yields the reply's body in the pieces in which it arrives.

        The connection is reused only if the caller reads to the end.

        Raises:
            BadReply: the request failed, or the reply broke off.
        """
        # aiohttp sends a file object in pieces, between which other tasks run.
        data = body if len(body) <= LARGE_BODY_BYTES else io.BytesIO(body)
        with _transport_errors():
            async with self._session.post(self.address + path, data=data, headers=_json_headers(body)) as reply:
                if not reply.ok:
                    raise StatusError(reply.status, await reply.read())
                content = reply.content
                while piece := await content.readany():
                    yield piece


def _json_headers(body: bytes | None) -> dict[str, str]:
    return {} if body is None else {"Content-Type": "application/json"}


@contextmanager
def _transport_errors() -> Iterator[None]:
    """Turns aiohttp's errors into ``BadReply``."""
    try:
        yield
    except TimeoutError as error:  # the base class of aiohttp's several timeout errors
        raise BadReply("timeout", _reason(error)) from None
    except aiohttp.ClientConnectorError as error:
        raise BadReply("connect", _reason(error)) from None
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
        raise BadReply("disconnect", _reason(error)) from None
    except aiohttp.ClientResponseError as error:  # the reply is not valid HTTP
        raise BadReply("stream", _reason(error)) from None
    except (aiohttp.ClientError, ValueError) as error:
        raise BadReply("connect", _reason(error)) from None


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
