"""The protocol of the waiting queue, which the scheduler or the branch ``tenants`` has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from radixkv.runtime.request import Request


class Queue(Protocol):
    """The waiting requests: which of them are admitted next. ``WaitingQueue`` has one order for all senders."""

    is_common: bool
    """Whether all requests are in one order, so that one that must start first holds back all others."""

    def __len__(self) -> int:
        """Returns how many requests could be admitted; those of a queue in front of this one do not count."""

    def __iter__(self) -> Iterator[Request]:
        """Yields these requests."""

    @property
    def version(self) -> int:
        """Changes whenever there are others of these requests."""

    def n_unstarted_beside(self, request: Request) -> int:
        """Returns how many requests wait for their first step, of those that share a limit with ``request``."""

    def take_received_before(self, time_s: float) -> list[Request]:
        """Removes and returns the requests that have not started and were received before that time."""

    def add(self, request: Request) -> None:
        """Queues a request by its priority and age, in phase ``WAITING``."""

    def remove(self, request: Request) -> None:
        """Removes a request."""

    def candidates(self) -> Iterable[Request]:
        """Returns requests in the order in which to try to admit them, without those that are retried alone."""

    def next_requests(self) -> Iterator[Request]:
        """Yields requests that will read the cache, those first that are admitted first."""

    def short(self, n_tokens: int, unfinished: Sequence[Request]) -> Iterable[Request]:
        """Returns requests with at most ``n_tokens`` to compute, which may overtake ``unfinished`` prompts."""

    def first(self, requests: Iterable[Request]) -> Request:
        """Returns which of some requests of one sender goes first, whether they are in the queue or not."""

    def count_passes(self, admitted: Sequence[Request]) -> None:
        """Counts that a step admits these requests before others that are earlier in order."""

    def charge(self, requests: Sequence[Request], n_tokens: int) -> None:
        """Counts that a step computes ``n_tokens`` tokens for each of these requests."""
