"""Agents that call tools: requests before each call and each answer, over a long beginning that all share."""

from __future__ import annotations

from itertools import islice

from radixkv.bench.session import Message, Request, Session, Turns
from radixkv.bench.workloads.answers import kept_line, right_beginning, right_call
from radixkv.bench.workloads.datasets.conversations import Conversation, read_conversations
from radixkv.bench.workloads.parameters import Answered
from radixkv.bench.workloads.problems.tools import Errand, errand_messages, made_errands
from radixkv.bench.workloads.questions import bad_lines, check_enough
from radixkv.bench.workloads.replay import replayed
from radixkv.bench.workloads.source import Made, Source
from radixkv.errors import ConfigError


class Agents(Answered, frozen=True, kw_only=True, tag="agents"):
    """Agents that call a tool for each request of their user, and then answer it.

    Agents with the same tools share the system prompt and the errands that were run before. Recorded agents are
    replayed with their own messages: each request has what had been said when the agent spoke.
    """

    num_sessions: int = 8
    num_turns: int = 3
    """Of the user in each session; a recorded one may have fewer."""
    num_shots: int = 12
    """Errands before those that are asked for; not of recorded agents."""
    max_characters: int = 18_000
    """Of a replayed request's messages, as JSON; longer requests are left out, and counted as ``too_long``."""
    output_len: int = 40

    def make(self, source: Source) -> Made:
        """A session an agent. O(size).

        Raises:
            ConfigError: the data set, of conversations, cannot be read, is too short, or has no request that is
                short enough.
        """
        if source.dataset is None:
            return self._made(source.seed)
        read = read_conversations(source.dataset, skip_bad_lines=source.skip_bad_lines)
        check_enough(source, "conversations", len(read.items), self.num_sessions, settings="num_sessions")
        cut = [_cut(conversation, self.num_turns) for conversation in read.items[: self.num_sessions]]
        made = replayed(cut, self.output_len, max_characters=self.max_characters)
        counts = {**bad_lines(read.n_bad_lines), **made.counts}
        if not made.sessions:
            raise ConfigError(
                f"of the first {self.num_sessions} conversations of {source.dataset} nothing can be asked: "
                f"{counts}; raise num_sessions or max_characters"
            )
        return Made(made.sessions, counts)

    def _made(self, seed: int) -> Made:
        errands = list(islice(made_errands(seed, self.num_turns), self.num_sessions))
        heads = self._heads({errand.system for errand in errands}, seed + 1)
        return Made([self._session(heads[errand.system], errand) for errand in errands])

    def _heads(self, systems: set[str], seed: int) -> dict[str, list[Message]]:
        """The messages that all sessions of each system prompt begin with."""
        heads: dict[str, list[Message]] = {}
        for errand in made_errands(seed, self.num_shots):
            if len(heads) == len(systems):
                break
            if errand.system in systems:
                heads.setdefault(errand.system, [*errand_messages(errand)])
        return heads

    def _session(self, head: list[Message], errand: Errand) -> Session:
        def turns() -> Turns:
            messages = list(head)
            for turn in errand.turns:
                messages.append({"role": "user", "content": turn.user})
                (reply,) = yield (Request(list(messages), self.output_len, is_right=right_call(turn.call)),)
                messages.append({"role": "assistant", "content": kept_line(reply.texts[0], turn.call)})
                messages.append({"role": "tool", "content": turn.result})
                (reply,) = yield (Request(list(messages), self.output_len, is_right=right_beginning(turn.answer)),)
                messages.append({"role": "assistant", "content": kept_line(reply.texts[0], turn.answer)})

        return Session(turns, n_requests=2 * len(errand.turns))


def _cut(conversation: Conversation, n_turns: int) -> Conversation:
    """Its beginning, up to where the user has spoken so often and wants to speak again."""
    places = [place for place, message in enumerate(conversation.messages) if message["role"] == "user"]
    end = places[n_turns] if len(places) > n_turns else len(conversation.messages)
    return Conversation(conversation.messages[:end])
