"""Counts of a run that its progress shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from radixkv.lab.bench.load.record import Record
from radixkv.terminal import Progress


class RequestProgress:
    """Counts a run's requests and tokens.

    Args:
        progress: shows the counts. None: they are not shown.
        n_requests: number of requests in the run.
    """

    def __init__(self, progress: Progress | None, n_requests: int) -> None:
        self._progress = progress
        self._n_requests = n_requests
        self._n_done = self._n_in_flight = self._n_failed = 0
        self._n_output = self._n_prompt = self._n_cached = 0

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Context that counts a request as in flight."""
        self._n_in_flight += 1
        self._show()
        try:
            yield
        finally:
            self._n_in_flight -= 1

    def done(self, record: Record) -> None:
        """Counts a request that was answered or failed."""
        self._n_done += 1
        self._n_failed += record.error is not None
        self._n_output += record.n_output_tokens
        self._n_prompt += record.n_prompt_tokens
        self._n_cached += record.n_cached_tokens or 0
        self._show()

    def _show(self) -> None:
        if self._progress is None:
            return
        share = f", {100 * self._n_cached / self._n_prompt:.0f}% cached" if self._n_prompt else ""
        failed = f", {self._n_failed} failed" if self._n_failed else ""
        self._progress.show(
            f"{self._n_done}/{self._n_requests}, {self._n_in_flight} in flight{share}{failed}, "
            f"{self._n_output} new tokens",
            self._n_output,
        )
