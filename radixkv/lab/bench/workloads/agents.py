"""Workload of agents that call tools."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import cycle, islice

from radixkv.lab.bench.session import BenchRequest, Reply, Session, ToolCall, Turns
from radixkv.lab.bench.workloads.base import FixedOutputParameters, Source, WorkloadSessions
from radixkv.lab.bench.workloads.conversations import replay_dataset
from radixkv.lab.bench.workloads.errands import AgentTask, Errand, generate_agents, task_messages

N_AGENTS = 4
"""Number of different sets of tools."""
MAX_ROUNDS = 5
"""Maximum number of requests for a message of the user; an agent that still calls tools then has failed."""


class Agents(FixedOutputParameters, frozen=True, kw_only=True, tag="agents"):
    """Agents that call tools until they can answer their user.

    The server gets the tools and the conversation so far; the client runs the tools that the model calls and sends
    the results back. Agents with the same tools share the system prompt and the example conversation.

    Recorded agents are replayed with their recorded messages.
    """

    num_sessions: int = 8
    num_turns: int = 3
    """User messages of each session; a recorded session may have fewer."""
    num_shots: int = 12
    """Turns of the example conversation before each generated session; recorded sessions have none."""
    max_characters: int = 18_000
    """Maximum length of a replayed request's messages as JSON; longer ones are left out as ``too_long``."""
    max_answer_len: int = 160
    """Maximum tokens of each answer of a generated session."""
    output_len: int = 40
    """Tokens of each answer of a recorded session; the end-of-sequence token is ignored."""

    def make(self, source: Source) -> WorkloadSessions:
        """Returns one session for each agent. O(size).

        Raises:
            ConfigError: the data set of conversations cannot be read, is too short, or has no request that is short
                enough.
        """
        if source.dataset is None:
            return self._generate(source.seed)
        return replay_dataset(
            source,
            num_sessions=self.num_sessions,
            num_turns=self.num_turns,
            output_len=self.output_len,
            max_characters=self.max_characters,
        )

    def _generate(self, seed: int) -> WorkloadSessions:
        rng = random.Random(seed)
        agents = islice(generate_agents(seed), N_AGENTS)
        heads = [agent.task(rng, self.num_shots) for agent in agents]
        return WorkloadSessions(
            [
                self._session(head, head.agent.task(rng, self.num_turns), f"{seed} {number}")
                for number, head in enumerate(islice(cycle(heads), self.num_sessions))
            ]
        )

    def tool_seconds(self, calls: Sequence[ToolCall], rng: random.Random) -> float | None:
        """Returns how long the tools take that a generated session has called; None if it ends with the calls."""
        return 0.0

    def _session(self, head: AgentTask, task: AgentTask, seed: str) -> Session:
        def turns() -> Turns:
            messages, rng = task_messages(head), random.Random(seed)
            after_s = 0.0
            for errand in task.errands:
                messages.append({"role": "user", "content": errand.user})
                made: tuple[ToolCall, ...] = ()
                for n_left in reversed(range(MAX_ROUNDS)):
                    request = BenchRequest(
                        list(messages),
                        self.max_answer_len,
                        check=_check(errand, made, is_last=n_left == 0),
                        ignore_eos=False,
                        tools=task.agent.definitions,
                        after_s=after_s,
                    )
                    (reply,) = yield (request,)
                    messages.append(reply.message)
                    after_s = 0.0
                    if not reply.tool_calls:
                        break
                    tool_s = self.tool_seconds(reply.tool_calls, rng)
                    if tool_s is None:
                        return
                    after_s = tool_s
                    made += reply.tool_calls
                    messages += [
                        {"role": "tool", "tool_call_id": call.id, "content": task.agent.run(call, task.world)}
                        for call in reply.tool_calls
                    ]

        return Session(turns, n_requests=sum(len(errand.steps) + 1 for errand in task.errands))


def _check(errand: Errand, made: tuple[ToolCall, ...], *, is_last: bool) -> Callable[[Reply], bool | None]:
    """Returns a check of the answer to an errand.

    Args:
        errand: what the user wants.
        made: the calls of the errand's earlier requests.
        is_last: whether further calls count as a wrong answer; otherwise a reply with calls is not judged.
    """

    def check(reply: Reply) -> bool | None:
        if reply.tool_calls:
            return False if is_last else None
        return errand.is_done_by(made, reply.texts[0])

    return check
