"""Beam groups: the choices of a request with beam search, each of which has the tokens of one beam.

A beam is planned until all its known tokens are computed. Its last row gives its *candidates*, and then it pauses.
When all beams of a group have candidates, the ``BeamSearch`` chooses, and each beam has one more token. No launched
step has a row of the group then, so its pages are shared and freed at once. See docs/decisions/0044-beams.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from radixkv.errors import InvalidRequest
from radixkv.runtime.beams.search import BeamSearch, FinishedBeam, Successor
from radixkv.runtime.protocols.queue import Queue
from radixkv.runtime.request import GREEDY, Phase, Request, Update
from radixkv.runtime.scheduler.running import RunningRequests
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire.messages import NewTokens, Submit, TokenLogprobs, unpack_tokens


class BeamGroup:
    """The ``Continuation`` of the choices of one request.

    Args:
        search: chooses.
        leader: the choice that computes the prompt; the others follow it.
        running: forks and frees the beams that have pages.
        waiting: where beams without pages go.
    """

    def __init__(self, search: BeamSearch, leader: Request, running: RunningRequests, waiting: Queue) -> None:
        self._search = search
        self._running = running
        self._waiting = waiting
        self._members = [leader]
        """The request of each beam, in the search's order: at first only the leader, later all choices."""
        self._candidates: dict[Request, TokenLogprobs] = {}
        """The likeliest next tokens of the beams that pause."""

    def take(self, request: Request, logprobs: TokenLogprobs | None) -> None:
        """Takes the candidates of a beam, which pauses. O(1)."""
        assert logprobs is not None, "a beam's rows ask for logprobs"
        self._candidates[request] = logprobs
        request.is_paused = True

    def advance(self) -> list[Update]:
        """Lets the search choose if all beams have candidates; one that has failed or was aborted gets none.

        O(width), and where it chooses ``BeamSearch.advance``, and ``RunningRequests.fork`` of the forks.
        """
        members = self._members
        if len(self._candidates) < len(members):
            return []
        chosen = self._search.advance([self._candidates[one] for one in members])
        self._candidates.clear()
        updates: list[Update] = []
        for request in members:
            request.is_paused = False
            if request.cache_use.counted is None:
                request.count_prompt()
                updates.append(Update(request))
        if self._search.is_ended:
            return updates + self._end()
        self._members = self._continue(chosen)
        return updates

    def _continue(self, chosen: Sequence[Successor]) -> list[Request]:
        """Gives each beam that goes on a request; returns them in the order of ``chosen``.

        A request goes on as the best beam that succeeds it. The other beams fork from their parents: they take the
        requests whose beams have no successor, and then those that have followed so far.
        """
        members = self._members
        parents = {parent for parent, _ in chosen}
        unused = [request for index, request in enumerate(members) if index not in parents]
        for request in unused:
            if request.phase is Phase.RUNNING:
                self._running.drop(request)
        unused += members[0].followers
        members[0].followers = []
        beams: list[Request] = []
        forks: list[tuple[Request, Request]] = []
        for parent, _ in chosen:
            if parent in parents:
                parents.remove(parent)
                beams.append(members[parent])
            else:
                beams.append(unused.pop(0))
                beams[-1].become_fork(members[parent])
                forks.append((members[parent], beams[-1]))
        for request, (_, token) in zip(beams, chosen, strict=True):
            request.known_key += token.to_bytes(TOKEN_BYTES, "little")
            request.reads_cache = True
        self._running.fork(forks)
        for request in beams:
            if request.phase is Phase.PAUSED:
                self._waiting.add(request)
        return beams

    def _end(self) -> list[Update]:
        """Finishes the group: its choices get the finished answers, the best one first."""
        members = self._members
        choices = sorted((*members, *members[0].followers), key=lambda request: request.choice)
        members[0].followers = []
        prompt = members[0].prompt_key
        updates: list[Update] = []
        without_pages = [request for request in choices if request.phase is not Phase.RUNNING]
        for request, beam in zip(choices, self._search.finished, strict=True):
            request.leader = None
            request.known_key = prompt + beam.tokens
            if request.phase is Phase.RUNNING:
                self._running.finish(request)
            request.phase = Phase.FINISHED
            output = _whole_output(request, beam)
            updates.append(Update(request, finish_reason=beam.finish_reason, output=output))
        self._running.release()
        for request in without_pages:
            self._running.notify_released(request)
        return updates


def open_group(
    message: Submit, choices: Sequence[Request], *, running: RunningRequests, waiting: Queue, vocab_size: int
) -> None:
    """Gives the choices of a request with beam search their ``BeamGroup``. O(choices).

    Raises ``InvalidRequest`` if the vocabulary has too few tokens for as many beams.
    """
    leader, sampling = choices[0], message.sampling
    search = BeamSearch(
        sampling.n,
        leader.max_tokens,
        length_penalty=sampling.length_penalty,
        eos_token_ids=leader.stop_token_ids,
    )
    if search.n_candidates > vocab_size:
        raise InvalidRequest(
            f"a beam search of width {sampling.n} needs {search.n_candidates} different next tokens, and the "
            f"vocabulary has {vocab_size}; reduce n",
            param="n",
        )
    group = BeamGroup(search, leader, running, waiting)
    for choice in choices:
        choice.sampling = replace(GREEDY, n_logprobs=search.n_candidates, seed=choice.sampling.seed)
        choice.continuation = group


def _whole_output(request: Request, beam: FinishedBeam) -> NewTokens:
    return NewTokens(
        id=request.id,
        tokens=beam.tokens,
        choice=request.choice,
        finish_reason=beam.finish_reason,
        stop_token_id=unpack_tokens(beam.tokens)[-1] if beam.finish_reason == "stop" else None,
        cumulative_logprob=beam.logprob,
    )
