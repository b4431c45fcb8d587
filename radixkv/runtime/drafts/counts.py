"""``DraftCounts``: what became of drafts."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

from radixkv.runtime.request import Request
from radixkv.wire.messages import DraftUse
from radixkv.wire.stats import DraftStats, SourceStats


class DraftCounts:
    """Counts drafts, by the source that guessed them, by their places, and by request until it has ended.

    O(sources), and O(places) for ``stats``.

    Args:
        n_tokens: most drafts of a row.
    """

    def __init__(self, n_tokens: int) -> None:
        self._sources: dict[int, str] = {}
        """The source of each row's last guess, by batch slot."""
        self._n_drafted: Counter[str] = Counter()
        self._n_accepted: Counter[str] = Counter()
        self._by_request: dict[str, list[int]] = {}
        """How many drafts of each running request were accepted, and how many checked, by its id."""
        self._n_rows = [0] * (n_tokens + 1)
        """Rows by how many of their drafts were accepted."""
        self._n_waited = 0

    @property
    def n_accepted(self) -> int:
        """Accepted drafts of all sources."""
        return self._n_accepted.total()

    def guessed(self, request: Request, source: str) -> None:
        """Takes note that the drafts of a request's next row, if it gets some, are a guess of ``source``."""
        self._sources[request.batch_slot] = source

    def verified(self, request: Request, n_drafts: int, n_accepted: int) -> None:
        """Counts the drafts of a row."""
        source = self._sources[request.batch_slot]
        self._n_rows[n_accepted] += 1
        self._n_drafted[source] += n_drafts
        self._n_accepted[source] += n_accepted
        of_request = self._by_request.setdefault(request.id, [0, 0])
        of_request[0] += n_accepted
        of_request[1] += n_drafts

    def step_done(self, *, has_waited: bool) -> None:
        """Counts a step if its plan was made when the results of all steps before it were known."""
        self._n_waited += has_waited

    def ended(self, request_id: str) -> DraftUse:
        """Forgets a request; returns what became of its drafts."""
        n_accepted, n_drafts = self._by_request.pop(request_id, (0, 0))
        return DraftUse(n_accepted, n_drafts - n_accepted)

    def stats(self) -> DraftStats:
        """Returns the counters since the start."""
        return DraftStats(
            drafts_total=sum(self._n_rows),
            draft_tokens_total=self._n_drafted.total(),
            accepted_tokens_total=self.n_accepted,
            steps_without_overlap_total=self._n_waited,
            by_source={
                source: SourceStats(n_drafted, self._n_accepted[source])
                for source, n_drafted in self._n_drafted.items()
            },
            accepted_by_position=tuple(accumulate(self._n_rows[:0:-1]))[::-1],
        )
