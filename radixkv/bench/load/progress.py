"""Progress display of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from radixkv.bench.load.record import Record
from radixkv.terminal_progress import REFRESH_S, Progress


class RequestProgress:
    """Counts a run's requests and tokens.

    Args:
        progress: shows the counts. None: they are not shown.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._n_done = self._n_in_flight = self._n_failed = 0
        self._n_output = self._n_prompt = self._n_cached = 0

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Context that counts a request as in flight."""
        self._n_in_flight += 1
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
        self.show()

    def show(self) -> None:
        """Shows the counts. Cheap: most calls write nothing."""
        if self._progress is None:
            return
        share = f", {100 * self._n_cached / self._n_prompt:.0f}% cached" if self._n_prompt else ""
        failed = f", {self._n_failed} failed" if self._n_failed else ""
        self._progress.show(self._n_done, self._n_output, f"{self._n_in_flight} in flight{share}{failed}")

    async def watch(self) -> None:
        """Shows the counts periodically, also while no answer arrives. Does not return."""
        while True:
            self.show()
            await asyncio.sleep(REFRESH_S)
