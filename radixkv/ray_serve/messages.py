"""What the ingress and the replicas of servers send each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardedRequest:
    """A client's HTTP request."""

    method: str
    path: str
    """With the query."""
    headers: list[tuple[str, str]]
    body: bytes


@dataclass(frozen=True)
class ReplyHead:
    """The head of a server's reply; the pieces of its body follow."""

    status: int
    headers: list[tuple[str, str]]


@dataclass(frozen=True)
class NotTaken:
    """The server has refused the request or was not there, before it began any work on it.

    So the request can be sent to another server.
    """

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    """The reply for the client, if no other server takes the request."""
