"""Workload of agents that call tools."""

from __future__ import annotations

from itertools import islice

from radixkv.bench.session import BenchRequest, Message, Session, Turns
from radixkv.bench.workloads.answers import answer_line, prefix_check, tool_call_check
from radixkv.bench.workloads.datasets.conversations import Conversation, read_conversations
from radixkv.bench.workloads.parameters import FixedOutputParameters
from radixkv.bench.workloads.problems.tools import ToolTask, generate_tool_tasks, tool_task_messages
from radixkv.bench.workloads.questions import bad_lines, check_enough
from radixkv.bench.workloads.replay import replay_sessions
from radixkv.bench.workloads.source import Source, WorkloadSessions
from radixkv.errors import ConfigError


class Agents(FixedOutputParameters, frozen=True, kw_only=True, tag="agents"):
    """Agents that call one tool for each message of their user, and then answer.

    The prompt before each call and each answer is the conversation so far. Agents with the same tools share the
    system prompt and the example conversation. Recorded agents are replayed with their recorded messages.
    """

    num_sessions: int = 8
    num_turns: int = 3
    """User messages of each session; a recorded session may have fewer."""
    num_shots: int = 12
    """Turns of the example conversation before each generated session; recorded sessions have none."""
    max_characters: int = 18_000
    """Maximum length of a replayed request's messages as JSON; longer ones are left out as ``too_long``."""
    output_len: int = 40

    def make(self, source: Source) -> WorkloadSessions:
        """Returns one session for each agent. O(size).

        Raises:
            ConfigError: the data set of conversations cannot be read, is too short, or has no request that is short
                enough.
        """
        if source.dataset is None:
            return self._generate(source.seed)
        read = read_conversations(source.dataset, skip_bad_lines=source.skip_bad_lines)
        check_enough(source, "conversations", len(read.items), self.num_sessions, settings="num_sessions")
        truncated = [_truncate(conversation, self.num_turns) for conversation in read.items[: self.num_sessions]]
        replayed = replay_sessions(truncated, self.output_len, max_characters=self.max_characters)
        counts = {**bad_lines(read.n_bad_lines), **replayed.counts}
        if not replayed.sessions:
            raise ConfigError(
                f"the first {self.num_sessions} conversations of {source.dataset} have no request to send: "
                f"{counts}; raise num_sessions or max_characters"
            )
        return WorkloadSessions(replayed.sessions, counts)

    def _generate(self, seed: int) -> WorkloadSessions:
        tasks = list(islice(generate_tool_tasks(seed, self.num_turns), self.num_sessions))
        heads = self._heads({task.system for task in tasks}, seed + 1)
        return WorkloadSessions([self._session(heads[task.system], task) for task in tasks])

    def _heads(self, systems: set[str], seed: int) -> dict[str, list[Message]]:
        """Returns for each system prompt the messages that all its sessions begin with."""
        heads: dict[str, list[Message]] = {}
        for task in generate_tool_tasks(seed, self.num_shots):
            if len(heads) == len(systems):
                break
            if task.system in systems:
                heads.setdefault(task.system, [*tool_task_messages(task)])
        return heads

    def _session(self, head: list[Message], task: ToolTask) -> Session:
        def turns() -> Turns:
            messages = list(head)
            for turn in task.turns:
                messages.append({"role": "user", "content": turn.user})
                (reply,) = yield (BenchRequest(list(messages), self.output_len, check=tool_call_check(turn.call)),)
                messages.append({"role": "assistant", "content": answer_line(reply.texts[0], turn.call)})
                messages.append({"role": "tool", "content": turn.result})
                (reply,) = yield (BenchRequest(list(messages), self.output_len, check=prefix_check(turn.answer)),)
                messages.append({"role": "assistant", "content": answer_line(reply.texts[0], turn.answer)})

        return Session(turns, n_requests=2 * len(task.turns))


def _truncate(conversation: Conversation, n_turns: int) -> Conversation:
    """Returns the conversation without the user's message number ``n_turns + 1`` and all that follows."""
    indices = [index for index, message in enumerate(conversation.messages) if message["role"] == "user"]
    end = indices[n_turns] if len(indices) > n_turns else len(conversation.messages)
    return Conversation(conversation.messages[:end])
