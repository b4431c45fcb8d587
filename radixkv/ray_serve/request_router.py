"""A request router of Ray Serve that asks each server what it has of the prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from radixkv.frontend.replicas.placement import UNKNOWN_S
from radixkv.frontend.replicas.recent_prefixes import RecentPrefixes, prefixes_of
from radixkv.ray_serve.match_probe import LOAD_QUESTION, Match, Question, match_question, read_match
from radixkv.ray_serve.messages import ForwardedRequest
from radixkv.routing import ServerChoice

PROBE_TIMEOUT_S = 1.0
"""Default limit of the time in which a server must say what it has."""


class MatchRouter(RequestRouter):
    """Sends each request to the server that ``ServerChoice`` chooses by the answers to ``/cache/match``.

    What the router has sent to a server in the last seconds counts as if the server had it.

    The request must be the first argument of the call. Servers that do not answer get a request only if no other
    replica takes it.
    """

    def initialize_state(self, probe_timeout_s: float = PROBE_TIMEOUT_S) -> None:
        """Called by Ray Serve with the ``request_router_kwargs`` of the deployment.

        Args:
            probe_timeout_s: a server that takes longer to answer counts as one that does not answer.
        """
        self._probe_timeout_s = probe_timeout_s
        self._recent: RecentPrefixes[ReplicaID] = RecentPrefixes()
        self._choice: ServerChoice[ReplicaID] = ServerChoice()
        self._session: aiohttp.ClientSession | None = None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the chosen replica, then the others that answered, by load, then those that did not answer."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        question = self._question(pending_request.args)
        answers = await asyncio.gather(*(self._ask(replica, question) for replica in candidate_replicas))
        matches = {
            replica.replica_id: match
            for replica, match in zip(candidate_replicas, answers, strict=True)
            if match is not None
        }
        silent = [replica for replica in candidate_replicas if replica.replica_id not in matches]
        if not matches:
            return [silent]
        n_tokens, now_s = max(match.n_tokens for match in matches.values()), time.monotonic()
        prefixes = prefixes_of(question.prompt, question.namespace)
        recent = self._recent.matched(prefixes, dict.fromkeys(matches, now_s - UNKNOWN_S))
        chosen = self._choice.choose(
            n_tokens,
            {
                replica: max(match.n_matched, n_tokens * recent.get(replica, 0) // max(1, len(question.prompt)))
                for replica, match in matches.items()
            },
            {replica: match.n_in_flight for replica, match in matches.items()},
            now_s,
        )
        self._recent.add(prefixes, chosen, now_s)
        others = [replica for replica in candidate_replicas if replica.replica_id in matches.keys() - {chosen}]
        others.sort(key=lambda replica: matches[replica.replica_id].n_in_flight)
        first = [replica for replica in candidate_replicas if replica.replica_id == chosen]
        return [rank for rank in (first, *([replica] for replica in others), silent) if rank]

    @staticmethod
    def _question(arguments: Sequence[Any]) -> Question:
        request = arguments[0] if arguments else None
        return match_question(request) if isinstance(request, ForwardedRequest) else LOAD_QUESTION

    async def _ask(self, replica: RunningReplica, question: Question) -> Match | None:
        """Returns what the server of a replica has; None if it does not answer in time.

        A server that refuses the question, because the prompt is malformed or too long, is asked for its load: it
        will refuse the request itself, with a message for the client.
        """
        metadata = replica.replica_metadata
        if "address" not in metadata:
            return None
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {metadata['api_key']}"}
        url = f"{metadata['address']}/cache/match"
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._probe_timeout_s))
        try:
            async with self._session.post(url, data=question.body, headers=headers) as reply:
                if reply.ok:
                    return read_match(await reply.read())
            if reply.status < 500 and question != LOAD_QUESTION:
                return await self._ask(replica, LOAD_QUESTION)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
            pass
        return None
