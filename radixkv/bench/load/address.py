"""Parsing of a server's base URL."""

from __future__ import annotations

from urllib.parse import urlsplit

from radixkv.errors import ConfigError


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
