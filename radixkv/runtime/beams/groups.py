"""Beam groups: the choices of a request with beam search, each of which has the tokens of one beam.

A beam is planned until all its known tokens are computed. Its last row gives its *candidates*, and then it waits.
When all beams of a group have candidates, the ``BeamSearch`` chooses, and each beam has one more token. No launched
step has a row of the group then, so its pages are shared and freed at once. See docs/decisions/0044-beams.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from radixkv.runtime.beams.search import BeamSearch, Continuation
from radixkv.runtime.request import Phase, Request, Update
from radixkv.runtime.scheduler.running import RunningRequests
from radixkv.runtime.tenants.fair_queue import Queue
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire.messages import TokenLogprobs


class BeamGroups:
    """The groups of all unfinished requests with beam search.

    Args:
        running: forks and frees the beams that have pages.
        waiting: where beams without pages go.
    """

    def __init__(self, running: RunningRequests, waiting: Queue) -> None:
        self._running = running
        self._waiting = waiting
        self._members: dict[BeamSearch, list[Request]] = {}
        """The request of each beam, in the search's order: at first only the leader, later all choices."""

    def __len__(self) -> int:
        return len(self._members)

    def add(self, leader: Request) -> None:
        """Adds the group of a new request. Does nothing if the request has no beam search. O(1)."""
        if leader.search is not None:
            self._members[leader.search] = [leader]

    def forget(self, request: Request) -> None:
        """Forgets the group of a request that is aborted, or has failed. O(1)."""
        if request.search is not None:
            self._members.pop(request.search, None)

    def forget_failed(self, updates: Iterable[Update]) -> None:
        """Forgets the groups of requests that have failed. O(updates)."""
        for update in updates:
            if update.error is not None:
                self.forget(update.request)

    def advance(self, requests: Iterable[Request]) -> list[Update]:
        """Lets the groups of the requests of a finished step choose, if all their beams have candidates.

        O(requests), and for a group that chooses ``BeamSearch.advance``, and ``RunningRequests.fork`` of its forks.
        """
        updates: list[Update] = []
        if not self._members:
            return updates
        found = {one.search: None for one in requests if one.search is not None and one.candidates is not None}
        for search in found:
            members = self._members.get(search, [])  # none if a beam of the group has just failed
            candidates = [one.candidates for one in members if one.candidates is not None]
            if members and len(candidates) == len(members):
                updates += self._choose(search, members, candidates)
        return updates

    def _choose(
        self, search: BeamSearch, members: Sequence[Request], candidates: Sequence[TokenLogprobs]
    ) -> list[Update]:
        chosen = search.advance(candidates)
        updates: list[Update] = []
        for request in members:
            request.candidates = None
            if request.cache_use.counted is None:
                request.count_prompt()
                updates.append(Update(request))
        if search.is_ended:
            return updates + self._end(search, members)
        self._members[search] = self._continue(members, chosen)
        return updates

    def _continue(self, members: Sequence[Request], chosen: Sequence[Continuation]) -> list[Request]:
        """Gives each beam that goes on a request; returns them in the order of ``chosen``.

        A request goes on as the best beam that continues it. The others fork from it, as requests that nothing
        continues, or that have followed so far.
        """
        heirs = {parent for parent, _ in chosen}
        spare = [request for index, request in enumerate(members) if index not in heirs]
        for request in spare:
            if request.phase is Phase.RUNNING:
                self._running.drop(request)
        spare += members[0].followers
        members[0].followers = []
        beams: list[Request] = []
        forks: list[tuple[Request, Request]] = []
        for parent, _ in chosen:
            if parent in heirs:
                heirs.remove(parent)
                beams.append(members[parent])
            else:
                beams.append(spare.pop(0))
                beams[-1].become_fork(members[parent])
                forks.append((members[parent], beams[-1]))
        for request, (_, token) in zip(beams, chosen, strict=True):
            request.tokens += token.to_bytes(TOKEN_BYTES, "little")
            request.reads_cache = True
        self._running.fork(forks)
        for request in beams:
            if request.phase is Phase.HELD:
                request.phase = Phase.WAITING
                self._waiting.add(request)
        return beams

    def _end(self, search: BeamSearch, members: Sequence[Request]) -> list[Update]:
        """Finishes a group: its choices get the finished answers, the best one first."""
        choices = sorted((*members, *members[0].followers), key=lambda request: request.choice)
        members[0].followers = []
        prompt = members[0].prompt
        updates: list[Update] = []
        without_pages = [request for request in choices if request.phase is not Phase.RUNNING]
        for request, beam in zip(choices, search.finished, strict=True):
            request.leader = None
            request.tokens = prompt + beam.tokens
            if request.phase is Phase.RUNNING:
                self._running.finish(request)
            request.phase = Phase.FINISHED
            updates.append(Update(request, finish_reason=beam.finish_reason, beam=beam))
        self._running.release()
        for request in without_pages:
            self._running.notify_released(request)
        self.forget(members[0])
        return updates
